"""What can be said of given features: the noise of samplers, two data sets compared, representatives, advice."""
