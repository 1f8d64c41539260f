"""Forecast a run's time and memory without a GPU or data.

`memory` runs the training step on fake tensors and counts their bytes. `forecast` computes hours,
GPU-hours, CPU cores and disk space from the number of steps and the GPU's peak FLOP/s.
"""
