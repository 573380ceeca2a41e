"""The run file: sections and keys, the table of workloads, overrides, and which code a run may execute.

May import `io`, `hardware` and `errors`. The names are imported when first used: the registry needs no pydantic.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
