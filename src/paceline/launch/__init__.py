"""Starting ranks, or finding out who started them, and bringing them together."""
