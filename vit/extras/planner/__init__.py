"""Forecast the needs of a run without a GPU and without the data.

`memory` runs the training step on tensors without memory and counts bytes. `forecast` combines that
with the plan of steps and the GPU's peak to hours, GPU-hours, cores and disk.
"""
