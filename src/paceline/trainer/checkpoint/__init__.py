"""Checkpoints: written aside, sealed with checksums, found again, and read on any number of ranks."""
