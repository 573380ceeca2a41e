"""What can be trained: each file a model with its data and its loss."""
