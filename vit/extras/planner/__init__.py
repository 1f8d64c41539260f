"""Forecast a run's time and memory without a GPU or data.

`memory` runs the training step on fake tensors and counts their bytes. `roofline` predicts the time
per image from a GPU's data sheet, and `speed` corrects this time with measurements. `forecast`
computes hours, GPU-hours, CPU cores and disk space from both.
"""
