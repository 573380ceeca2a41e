"""The report as Markdown and as a LaTeX article that a stock TeX compiles."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.reporting.charts import Chart
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


def markdown(contents: Contents, charts: Sequence[Chart], tables: Sequence[Table], figures: bool) -> str:
    text = template("report.md.j2", cell=lambda text: str(text).replace("|", "\\|")).render(
        contents=contents, charts=charts, tables=tables, figures=figures
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def latex(contents: Contents, charts: Sequence[Chart], tables: Sequence[Table], figures: bool) -> str:
    made = template("report.tex.j2", signs=SIGNS, tex=tex)
    return str(made.render(contents=contents, charts=charts, tables=tables, figures=figures, sources=_sources))


def _sources(chart: Chart) -> str:
    named = [tex(text) for text, _ in chart.sources[:3]]
    left = len(chart.sources) - len(named) + chart.more_sources
    return ", ".join(named) + (f" and {left} more" if left else "")


def tex(text: str) -> str:
    """Text with every sign that TeX would take for a command made plain; letters it has no font for become ?."""
    found = "".join(TEX.get(sign, sign) for sign in str(text))
    return found.encode("latin-1", "replace").decode("latin-1")
