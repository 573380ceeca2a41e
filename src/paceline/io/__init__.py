"""Read and write files, YAML, tables and text safely.

Imports errors.
"""
