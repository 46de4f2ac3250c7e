"""What a sampler can and cannot help on given features, and what to use there."""

from vardass.analysis.doctor.diagnosis import Advice, ClassShares, Diagnosis, KernelPart, Limits, SamplerEffect
from vardass.analysis.doctor.measure import diagnose, strata_leave

__all__ = ["Advice", "ClassShares", "Diagnosis", "KernelPart", "Limits", "SamplerEffect", "diagnose", "strata_leave"]
