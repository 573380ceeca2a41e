"""Passes over documents on a GPU: kernels, and the places where their counts are kept."""
