"""What happens before the first step: checks, the step and its model, and the first lines."""
