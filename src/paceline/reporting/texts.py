"""The report as Markdown and as a LaTeX article that a stock TeX compiles."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.reporting.charts import Exhibit
from paceline.reporting.contents import Contents
from paceline.reporting.page import template
from paceline.reporting.tables import Table

TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_\allowbreak{}",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "×": r"$\times$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "≈": r"$\approx$",
    "→": r"$\to$",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "✗": r"$\times$",
    "✓": r"$\checkmark$",
    "|": r"\textbar{}",
    "/": r"/\allowbreak{}",
}


SIGNS = {
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "<<",
    "variable_end_string": ">>",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
}


def markdown(contents: Contents, exhibits: Sequence[Exhibit], tables: Sequence[Table], figures: bool) -> str:
    text = template("report.md.j2", cell=lambda text: str(text).replace("|", "\\|")).render(
        contents=contents, exhibits=exhibits, tables=tables, figures=figures, findings=findings_of(contents)
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def latex(contents: Contents, exhibits: Sequence[Exhibit], tables: Sequence[Table], figures: bool) -> str:
    return str(
        template("report.tex.j2", signs=SIGNS, tex=tex).render(
            contents=contents,
            exhibits=exhibits,
            tables=tables,
            figures=figures,
            findings=findings_of(contents),
            sources=_sources,
        )
    )


def findings_of(contents: Contents) -> list[object]:
    return [finding for s in contents.series for finding in s.findings]


def _sources(exhibit: Exhibit) -> str:
    named = [tex(text) for text, _ in exhibit.sources[:3]]
    left = len(exhibit.sources) - len(named) + exhibit.more_sources
    return ", ".join(named) + (f" and {left} more" if left else "")


def tex(text: str) -> str:
    """Text with every sign that TeX would take for a command made plain; letters it has no font for become ?."""
    found = "".join(TEX.get(sign, sign) for sign in str(text))
    return found.encode("latin-1", "replace").decode("latin-1")
