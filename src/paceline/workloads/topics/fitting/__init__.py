"""The fit: where it begins, the steps of accelerated EM, one rank's part of it."""
