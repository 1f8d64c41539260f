"""Measure how fast this machine trains a config, with the real step and the real loader.

`synthetic` generates batches without reading a dataset. `step_time` measures the time and memory of
the training step. `loading` times the loader with and without the step. `certificate` writes the
results file that `vit.extras.planner.forecast` reads. The command is `launch/bench.py`.
"""
