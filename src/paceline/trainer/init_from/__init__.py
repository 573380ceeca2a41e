"""Weights to begin with (`model.start`): read from files and run folders, and matched with the model's."""
