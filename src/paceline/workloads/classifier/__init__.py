"""A transformer encoder that sorts texts into classes."""
