"""Analyses of given features: the noise of samplers, comparison of two data sets, representatives, advice."""
