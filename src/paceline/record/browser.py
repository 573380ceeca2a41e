"""Pages that open offline in a browser, and what it may do with them."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any


def policy(*scripts: str) -> str:
    """What a browser may do with a page: run these scripts, and nothing that came with the numbers; ask no network."""
    sums = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    run = " ".join(f"'sha256-{found}'" for found in sums) or "'none'"
    shown = f"script-src {run}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {shown}; base-uri 'none'; form-action 'none'"


def page_data(value: Any) -> str:
    """JSON that cannot end the element of a page it stands in."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
