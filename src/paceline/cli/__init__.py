"""The command line: one module per verb or few verbs, and the table of verbs in `main`.

It may import everything; nothing imports it.
"""
