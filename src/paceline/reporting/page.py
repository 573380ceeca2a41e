"""The report as a page, as Markdown, and as a LaTeX article that a stock TeX compiles.

The page is one HTML file that opens offline, with its charts, its style and its numbers inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.record.browser import page_data, policy, template
from paceline.record.units import duration, number, percent
from paceline.reporting.chart import Chart
from paceline.reporting.contents import Contents
from paceline.reporting.pictures import pictures_of
from paceline.reporting.tables import Table
from paceline.signs import visible

ASSETS = Path(__file__).parent / "assets"
ORDER = (
    *("scaling", "breakdown", "links", "experiments", "evaluation", "loss", "difference", "classes", "confusion"),
    *("rate", "compute", "lr", "gradient", "usage", "memory", "benefit", "runs"),
)
"""The story of a page: does it pay, why, is it the same training, what does it take."""
TEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "{}$&#%"},
    "_": r"\_\allowbreak{}",
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


def page(contents: Contents, charts: Sequence[Chart], tables: Sequence[Table]) -> str:
    from markupsafe import Markup

    lines = asset("chart.umd.min.js").splitlines()
    library = "\n".join(line for line in lines if "sourceMappingURL" not in line).replace("</script", "<\\/script")
    script = asset("page.js")
    return template(asset("page.html.j2")).render(
        contents=contents,
        charts=charts,
        tables=tables,
        tiles=tiles(contents),
        pictures=pictures_of(contents.runs),
        order=ORDER,
        data=Markup(page_data({chart.name: chart.data for chart in charts})),
        library=Markup(library),
        script=Markup(script),
        policy=policy(library, script),
        style=Markup(asset("page.css")),
    )


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def tiles(contents: Contents) -> list[tuple[str, str, str]]:
    """A few large numbers: of the best row where rows were measured, else of the run."""
    if len(contents.series) == 1 and (best := contents.series[0].recommended) is not None:
        s, cost = contents.series[0], best.cost
        found = [
            ("recommended", best.label, f"of {len(s.rows)} rows"),
            ("speed-up", f"{number(best.speedup, 3)}×", "over one rank" if s.timed else "over one device"),
            ("efficiency", percent(best.efficiency), "of what is paid for"),
        ]
        if s.timed:
            found.append(("rate", number(best.samples_per_s, 3), "samples/s"))
        if cost.cost_usd is not None:
            found.append(("cost", number(cost.cost_usd, 3), "USD for the whole run"))
        elif cost.hours is not None:
            found.append(("time", duration(cost.hours * 3600), "for the whole run"))
        return found
    if len(contents.runs) == 1 and (told := contents.runs[0].summary) is not None:
        return [
            ("status", told.status, f"after {duration(told.seconds)}"),
            ("rate", number(told.samples_per_s, 3), "samples/s"),
            ("loss", number(told.loss_last), f"of the last {told.loss_last_steps} of {told.trained.steps:,} steps"),
            *((name, number(value), "evaluation") for name, value in list(told.evaluation.metrics.items())[:2]),
        ]
    return []


def markdown(contents: Contents, charts: Sequence[Chart], tables: Sequence[Table]) -> str:
    made = template(asset("report.md.j2"), html=False, value=_plain, cell=lambda text: str(text).replace("|", "\\|"))
    text = made.render(contents=contents, charts=charts, tables=tables)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _plain(value: Any) -> Any:
    """Text in which Markdown sees no HTML, no link, no picture from elsewhere and no other line."""
    if not isinstance(value, str):
        return value
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", visible(" ".join(value.split("\n"))))
    return re.sub(r"\](?=[(\[:])", r"]\\", text)


def latex(contents: Contents, charts: Sequence[Chart], tables: Sequence[Table]) -> str:
    made = template(asset("report.tex.j2"), html=False, signs=SIGNS, tex=tex)
    return str(made.render(contents=contents, charts=charts, tables=tables, sources=_sources))


def _sources(chart: Chart) -> str:
    named = [tex(text) for text, _ in chart.sources[:3]]
    left = len(chart.sources) - len(named) + chart.more_sources
    return ", ".join(named) + (f" and {left} more" if left else "")


def tex(text: str) -> str:
    """Text with every sign that TeX would take for a command made plain; letters it has no font for become ?."""
    found = "".join(" " if sign.isspace() else TEX.get(sign, sign) for sign in visible(str(text)))
    return found.encode("latin-1", "replace").decode("latin-1")
