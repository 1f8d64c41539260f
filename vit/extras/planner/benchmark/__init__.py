"""Measure how fast this machine trains a config, with the real step and the real loader.

`synthetic` makes batches without data. `step_time` measures the time and memory of the training
step. `loading` times the loader alone and with the step. `certificate` writes the numbers for
`vit.extras.planner.forecast`. The command is `launch/bench.py`.
"""
