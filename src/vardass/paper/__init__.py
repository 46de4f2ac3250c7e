"""All that exists because of the paper: its theorems, figures, numbers and presets, data sets and rivals."""
