"""Runs as jobs of a scheduler: site files, what Slurm is asked, and the verbs submit, jobs, logs and cancel."""
