"""Measure how fast this machine trains a config, with the real step and the real loader.

`subject` generates batches without reading a dataset. `step_time` measures the time and memory of
the training step, and the loader with and without it. `certificate` writes the results file that
`vit.extras.planner.forecast` reads. The command is `launch/bench.py`.
"""
