"""What a run will need, before any of it exists: neither a GPU nor the data are used.

`memory` runs the training step on tensors without memory and counts bytes, `forecast` puts that
together with the plan of steps and the GPU's peak: hours, GPU-hours, cores and disk.
"""
