"""The code that runs before the first step: it checks the hosts, creates the model and its training
step, and writes the first log lines."""
