"""Runs as jobs of a scheduler: site files, what Slurm is asked and answers, and the verbs submit, jobs, logs, cancel."""
