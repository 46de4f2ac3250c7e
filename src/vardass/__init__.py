"""Variance-reduced minibatches for training with a domain-discrepancy loss.

Strata for one domain, the weighted losses that use them, and what they save:

>>> import torch, vardass
>>> z = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
>>> strata = vardass.stratify(z, k=16, kernel="mmd")
>>> strata.variance < strata.uniform_variance
True
"""

from vardass.errors import InputError, VardassError, VardassWarning
from vardass.kernels import (
    CoralKernel,
    FunctionKernel,
    Kernel,
    LaplacianKernel,
    LinearKernel,
    PolynomialKernel,
    RBFMixture,
)
from vardass.losses import CORALLoss, MMDLoss, coral, mmd2
from vardass.strata import Strata
from vardass.stratify import stratify

__version__ = "0.1.0"

__all__ = [
    "CORALLoss",
    "CoralKernel",
    "FunctionKernel",
    "InputError",
    "Kernel",
    "LaplacianKernel",
    "LinearKernel",
    "MMDLoss",
    "PolynomialKernel",
    "RBFMixture",
    "Strata",
    "VardassError",
    "VardassWarning",
    "coral",
    "mmd2",
    "stratify",
]
