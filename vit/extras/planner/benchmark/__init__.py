"""How fast this machine trains a config: the real step and the real loader under a clock.

`synthetic` makes batches that need no data, `step` times the training step, its parts and its
memory, `loading` times the loader alone and with the step, `certificate` puts the numbers together
and writes them for `vit.extras.planner.forecast` to read. `launch/bench.py` is the command.
"""
