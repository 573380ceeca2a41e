"""Trained models in use: opened from their run folder, asked for predictions, exported for others."""
