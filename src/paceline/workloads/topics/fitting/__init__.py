"""Fit a topic model: first topics, accelerated EM, and passes over documents on CPU cores and GPUs."""
