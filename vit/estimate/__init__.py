"""What a run will need, before any of it exists: neither a GPU nor the data are used.

`gpus` is the table of devices, `memory` runs the training step on tensors without memory and counts
bytes, `forecast` puts both together with the plan of steps: hours, GPU-hours, cores and disk.
"""
