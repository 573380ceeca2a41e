"""What a run leaves behind (its folder, its events, its summary) and what it shows while it runs."""
