"""Documents by terms in memory or on a device: blocks of them, their sums, their smallest types."""
