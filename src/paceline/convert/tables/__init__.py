"""The keys that other tools know, and what each of them is in a run file."""
