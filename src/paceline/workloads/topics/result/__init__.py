"""The result of a fit: the model and its file, new documents, plots and the explorer page."""
