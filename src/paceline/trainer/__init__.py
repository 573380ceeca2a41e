"""Training: the loop, the data order, the optimiser, the checkpoints."""
