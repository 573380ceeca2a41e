"""Weights to begin with (`model.init_from`): read from files and run folders, and matched with the model's."""
