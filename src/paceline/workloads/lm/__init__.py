"""A language model: windows of a stream of tokens."""
