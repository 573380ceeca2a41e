"""Start ranks, or detect who started them; process groups, heartbeats and hang diagnosis.

Imports config, errors, io.
"""
