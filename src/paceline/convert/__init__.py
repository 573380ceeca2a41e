"""The verb `adopt`: what people already have for other tools becomes a run file, key by key, and nothing is run."""
