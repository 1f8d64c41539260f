"""Show the record of a run on Weights & Biases (`log.wandb`) and in TensorBoard
(`log.tensorboard`)."""
