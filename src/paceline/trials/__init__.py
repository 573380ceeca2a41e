"""The verb `sweep`: a run file tried with several values of its keys, and which of them did best."""
