"""The charts as PNG, PDF and SVG, by matplotlib, and how every figure looks."""

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.io.escape import escape_hidden
from paceline.io.files import write_atomic
from paceline.reports.charts import STEP_TERMS, Chart

TERM_COLOURS = dict(zip(STEP_TERMS, ("#2563eb", "#d97706", "#be185d", "#059669", "#9ca3af"), strict=True))
WIDTH_IN, HEIGHT_IN = 6.4, 3.6
MOST_IN_LEGEND, MOST_MARKED = 15, 40
DrawFn = Callable[[Any, dict[str, Any]], None]
FORMATS = ("png", "pdf", "svg")
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#65a30d")
INK, FAINT = "#1f2937", "#6b7280"
STYLE_FILE = Path(__file__).parent / "assets" / "paceline.mplstyle"
NO_SETTINGS: Mapping[Any, Any] = MappingProxyType({})


def draw_figures(charts: Sequence[Chart], folder: Path) -> list[str]:
    with use_plot_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        for chart in charts:
            rows = len(chart.data.get("labels", ()))
            height = max(1.8, 0.9 + 0.42 * rows) if rows else HEIGHT_IN
            figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            DRAWINGS[chart.data["kind"]](axes, escape_mathtext(chart.data))
            axes.set_title(escape_mathtext(chart.title), y=1.0)  # without y all labels are measured to find a place
            for kind in FORMATS:
                write_figure(figure, folder / f"{chart.name}.{kind}")
                figure.set_layout_engine("none")  # the layout of the first format, which takes longer than drawing
    return [chart.name for chart in charts]


def _draw_scaling(axes: Any, data: dict[str, Any]) -> None:
    reach = data["reach"]
    axes.plot([1, reach], [1, reach], "--", color="#9ca3af", linewidth=1.2, label="ideal", zorder=3)
    several = len(data["lines"]) > 1
    for i, line in enumerate(data["lines"]):
        colour = COLOURS[i % len(COLOURS)]
        if line["fit"]:
            ranks, middle, low, high = zip(*line["fit"], strict=True)
            axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(ranks, middle, color=colour, linewidth=1.2, label=None if several else line["law"])
        points = line["points"]
        xs, ys = [p["x"] for p in points], [p["y"] for p in points]
        spans = [[max(0.0, p["y"] - p["low"]) for p in points], [max(0.0, p["high"] - p["y"]) for p in points]]
        axes.errorbar(xs, ys, spans, fmt="o", color=colour, capsize=3, markersize=5, label=line["name"])
        for p in points:
            twins = [q["y"] for q in points if q["x"] == p["x"]]
            if 1 < len(twins) <= 4:
                beside = (6, 5 if p["y"] == max(twins) else -11)
                axes.annotate(p["label"], (p["x"], p["y"]), beside, textcoords="offset points", size=8)
        if line["plan"]:
            label = None if several else "planned"
            axes.plot(*zip(*line["plan"], strict=True), "D", color=INK, mfc="none", markersize=5, label=label)
    axes.set(xlabel=data["unit"], ylabel="speed-up", xlim=(0, reach), ylim=(0, data["top"]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _add_legend(axes)


def _draw_bars(axes: Any, data: dict[str, Any]) -> None:
    """Draw stacked bars, the first row on top, with the plan as marks; a fixed label position saves time."""
    begins = [0.0] * len(data["labels"])
    for name, values in data["terms"].items():
        axes.barh(data["labels"], values, left=begins, color=TERM_COLOURS[name], height=0.6, label=data["names"][name])
        begins = [begin + value for begin, value in zip(begins, values, strict=True)]
    planned = [(value, i) for i, value in enumerate(data["plan"]) if value]
    if planned:
        axes.plot(*zip(*planned, strict=True), "|", color=INK, markersize=16, markeredgewidth=2, label="planned")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.yaxis.set_label_coords(0, 0.5)
    axes.set_xlabel(data["unit"])
    if planned or len(data["terms"]) > 1:
        axes.figure.legend(loc="outside lower center", ncols=4)


def _draw_lines(axes: Any, data: dict[str, Any]) -> None:
    lines = data["lines"]
    style = "o-" if data.get("marked") and max(len(line["points"]) for line in lines) <= MOST_MARKED else "-"
    wide = min(len(lines), 4) if data.get("overlaid") and len(lines) <= 6 else 0
    for i, line in enumerate(lines):
        if line["points"]:
            xs, ys, *_ = zip(*line["points"], strict=True)
            width = 1.3 + 2.4 * max(0, wide - 1 - i)
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(xs, ys, style, color=colour, linewidth=width, markersize=3.5, label=line["name"])
            if data.get("log_y"):
                axes.set_yscale("log")
    axes.set(xlabel=data["unit"], ylabel=data["label"])
    axes.xaxis.get_major_locator().set_params(integer=True)
    if data.get("from_zero"):
        axes.set_ylim(bottom=0)
    if len(lines) > 1:
        _add_legend(axes)


def _add_legend(axes: Any) -> None:
    if 0 < len(axes.get_legend_handles_labels()[0]) <= MOST_IN_LEGEND:
        axes.legend()


DRAWINGS: dict[str, DrawFn] = {"scaling": _draw_scaling, "bars": _draw_bars, "lines": _draw_lines}


@contextmanager
def use_plot_style(settings: Mapping[Any, Any] = NO_SETTINGS) -> Iterator[None]:
    """Draw with matplotlib's own defaults, our style and these settings.

    The user's matplotlibrc is ignored: matplotlib reads that of the current folder first, which may be a run from
    elsewhere, and it can call LaTeX with any text.
    """
    log = logging.getLogger("matplotlib")
    before = log.level
    log.setLevel(logging.ERROR)  # it would print lines of that file as they are
    try:
        import matplotlib.style
    finally:
        log.setLevel(before)
    with matplotlib.style.context(["default", STYLE_FILE, dict(settings)]):
        yield


def write_figure(figure: Any, file: Path, **options: Any) -> None:
    """Write a figure in the format that the file's name ends in, without the date."""
    kind, content = file.suffix.lower().removeprefix("."), io.BytesIO()
    about = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    figure.savefig(content, format=kind, metadata=about, **options)
    write_atomic(file, content.getvalue())


def write_png(figure: Any, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    write_figure(figure, file, dpi=110)


def escape_mathtext(value: Any) -> Any:
    """Return all texts of a chart with hidden characters escaped, and dollars that start no formula."""
    if isinstance(value, str):
        return escape_hidden(value).replace("$", r"\$")
    if isinstance(value, dict):
        return {key: escape_mathtext(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | dict):
        return [escape_mathtext(inner) for inner in value]
    return value
