"""Forecast a run's time and memory without a GPU and without the data.

`memory` runs the training step on fake tensors and counts bytes. `forecast` computes hours,
GPU-hours, CPU cores and disk space from the number of steps and the GPU's peak FLOP/s.
"""
