"""What a batch sampler does to the noise of training: one report for any samplers on given features."""

from vardass.analysis.sampler_noise.report import MEASURES, Estimate, SamplerRow, VarianceReport, variance_report

__all__ = ["MEASURES", "Estimate", "SamplerRow", "VarianceReport", "variance_report"]
