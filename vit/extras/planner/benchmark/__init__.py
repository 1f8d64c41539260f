"""Measure how fast this machine trains a config, with the real step and the real loader.

`synthetic` makes batches without data. `step_time` measures the time and memory of the training
step. `loading` times the loader alone and with the step. `certificate` writes the results file that
`vit.extras.planner.forecast` reads. The command is `launch/bench.py`.
"""
