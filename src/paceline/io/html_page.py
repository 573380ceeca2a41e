"""Pages that open offline in a browser, and what it may do with them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.io.escape import HIDDEN, escape_hidden, escape_values
from paceline.io.files import replace_nonfinite

ESCAPED = re.compile(r"\\[bfru]")
"""In JSON: a control character, perhaps."""


def build_content_policy(*scripts: str) -> str:
    """What a browser may do with a page: run these scripts, and nothing that came with the numbers; ask no network."""
    sums = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    run = " ".join(f"'sha256-{found}'" for found in sums) or "'none'"
    shown = f"script-src {run}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {shown}; base-uri 'none'; form-action 'none'"


def compile_template(
    text: str,
    *,
    html: bool = True,
    value: Callable[[Any], Any] | None = None,
    signs: Mapping[str, str] | None = None,
    **filters: Callable[..., Any],
) -> Any:
    """A template in which every value is shown as text: without markup of its own, and with all of it to be seen.

    `value` is done to each value instead; in LaTeX braces mean something else, and blocks have other `signs`.
    """
    from jinja2 import Environment

    made = Environment(
        autoescape=html,
        finalize=value or _shown,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        **(signs or {}),  # type: ignore[arg-type]
    )
    made.filters.update(filters)
    return made.from_string(text)


def _shown(value: Any) -> Any:
    """What is markup stays as it is."""
    return value if hasattr(value, "__html__") else escape_hidden(str(value))


def dump_page_data(value: Any) -> str:
    """JSON that cannot end the element of a page it stands in: all text can be seen, and what is no number is null."""
    text = _json(value)
    if HIDDEN.search(text) or ESCAPED.search(text):
        text = _json(escape_values(value))
    return text.replace("<", "\\u003c")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(replace_nonfinite(value), separators=(",", ":"), ensure_ascii=False)
