"""Measuring: where the time of a step went, how well more ranks pay, and why."""
