"""Templates, data and the content policy of pages that open offline in a browser."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.io.escape import HIDDEN, escape_hidden, escape_values
from paceline.io.files import replace_nonfinite

ESCAPED = re.compile(r"\\[bfru]")


def build_content_policy(*scripts: str) -> str:
    """Build a policy that allows these scripts only, and no network."""
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
    """Compile a template in which values are escaped, by `value` if given; `signs` are the delimiters of blocks."""
    from jinja2 import Environment

    made = Environment(
        autoescape=html,
        finalize=value or (lambda found: found if hasattr(found, "__html__") else escape_hidden(str(found))),
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        **(signs or {}),  # type: ignore[arg-type]
    )
    made.filters.update(filters)
    return made.from_string(text)


def dump_page_data(value: Any) -> str:
    """Dump JSON that cannot end the script element around it, with hidden characters escaped."""
    text = _dump_compact(value)
    if HIDDEN.search(text) or ESCAPED.search(text):
        text = _dump_compact(escape_values(value))
    return text.replace("<", "\\u003c")


def _dump_compact(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(replace_nonfinite(value), separators=(",", ":"), ensure_ascii=False)
