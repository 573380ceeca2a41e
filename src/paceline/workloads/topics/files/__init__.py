"""Counts from files: matrices, shards and texts, and the counts that are written."""
