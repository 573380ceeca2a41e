"""Texts: read from where they are, tokenised once, then served from memory-mapped arrays."""
