"""scikit-learn: strata as a clusterer, adapting classifiers in pipelines and searches.

pip install 'vardass[sklearn]'
"""

import numpy as np
import torch
from watch import report, target, x, y

from vardass.integrations.sklearn import CORALAdapter, MMDAdapter, Stratifier

strata = Stratifier(n_strata=16, kernel="coral").fit(x.numpy())
print(f"variance of a batch of 16: {strata.variance_ / strata.uniform_variance_:.3f} of that of uniform draws")
print(f"strata of new samples: {np.bincount(strata.predict(target.numpy()), minlength=16).tolist()}")

for adapter in (MMDAdapter(steps=150, lr=3e-3), CORALAdapter(steps=150, lr=3e-3)):
    adapter.fit(x.numpy(), y.numpy(), target.numpy())
    report(torch.from_numpy(adapter.predict(target.numpy())), type(adapter).__name__)
