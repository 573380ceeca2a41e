"""What a plan prices of a script."""
