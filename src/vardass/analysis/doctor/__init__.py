"""What a sampler can and cannot help on given features, and what to use there."""

from vardass.analysis.doctor.advice import Advice, Limits
from vardass.analysis.doctor.diagnosis import ClassShares, Diagnosis, KernelPart, SamplerEffect
from vardass.analysis.doctor.measure import diagnose

__all__ = ["Advice", "ClassShares", "Diagnosis", "KernelPart", "Limits", "SamplerEffect", "diagnose"]
