"""The page: one HTML file that opens offline, with its charts, its style and its numbers inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.record.units import duration, number, percent
from paceline.reporting.charts import Chart
from paceline.reporting.contents import Contents
from paceline.reporting.tables import Table

ASSETS = Path(__file__).parent / "assets"
ORDER = ("scaling", "breakdown", "links", "loss", "difference", "memory", "benefit", "runs")
"""The story of a page: does it pay, why, is it the same training, what does it take."""


def page(contents: Contents, charts: Sequence[Chart], tables: Sequence[Table], figures: bool) -> str:
    from markupsafe import Markup

    data = json.dumps({chart.name: chart.data for chart in charts}, separators=(",", ":"), ensure_ascii=False)
    library = "\n".join(line for line in asset("chart.umd.min.js").splitlines() if "sourceMappingURL" not in line)
    return template("page.html.j2", html=True).render(
        contents=contents,
        charts=charts,
        tables=tables,
        tiles=tiles(contents),
        figures=figures,
        order=ORDER,
        data=Markup(data.replace("<", "\\u003c")),
        library=Markup(library.replace("</script", "<\\/script")),
        script=Markup(asset("page.js")),
        style=Markup(asset("page.css")),
    )


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def template(name: str, *, html: bool = False, signs: Mapping[str, str] | None = None, **filters: Any) -> Any:
    """A template; in one for LaTeX, braces mean something else and blocks have other signs."""
    from jinja2 import Environment

    made = Environment(
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        **(signs or {}),  # type: ignore[arg-type]
    )
    made.filters.update(filters)
    return made.from_string(asset(name))


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
            ("last loss", number(told.loss_last), f"{told.trained.steps:,} steps"),
            *((name, number(value), "evaluation") for name, value in list(told.evaluation.metrics.items())[:2]),
        ]
    return []
