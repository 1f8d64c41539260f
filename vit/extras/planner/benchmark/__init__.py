"""Measure how fast this machine trains a config, with the real step and the real loader.

`synthetic` makes batches without data, `step_time` times the training step, its parts and its
memory, `loading` times the loader alone and with the step, `certificate` writes the numbers for
`vit.extras.planner.forecast`. `launch/bench.py` is the command.
"""
