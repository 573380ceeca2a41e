"""This machine, measured, and plans that use it."""
