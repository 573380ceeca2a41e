"""Report: runs, measurements and tables of times in; a page, figures, Markdown, LaTeX and CSV out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError
from paceline.io.files import write_atomic
from paceline.io.format import duration, format_metrics, number, percent
from paceline.io.table import UNKNOWN, Table, Tabular
from paceline.measurement.rows import drop_failed
from paceline.measurement.tables import build_links_table, build_measurement_tables, format_speedup
from paceline.reports.charts import build_charts
from paceline.reports.contents import ReportContents, gather_contents
from paceline.reports.figures import draw_figures
from paceline.reports.page import build_tiles, list_pictures, render_latex, render_markdown, render_page
from paceline.reports.run_view import MAX_KEYS, Experiments, describe_other_keys
from paceline.reports.series import Series
from paceline.runlog.summary import describe_baseline, select_class_results


def build_tables(contents: ReportContents) -> list[Table]:
    found = []
    for s in contents.series:
        name = f": {s.name}" if len(contents.series) > 1 else ""
        found += build_measurement_tables(s, name)
        if s.laws and s.laws[-1].curve[-1].ranks > max(row.ranks for row in drop_failed(s.rows)):
            found.append(_build_laws(s, name))
    found += [build_links_table(m.links, f": {m.name}" if len(contents.links) > 1 else "") for m in contents.links]
    if contents.experiments is not None:
        found.append(build_experiments_table(contents.experiments))
    elif contents.runs:
        found.append(_build_runs(contents))
    if len(contents.runs) == 1 and (ended := contents.runs[0].summary) is not None:
        found += _build_classes({**ended.evaluation.metrics, **ended.evaluation.arrays})
    return found


def _build_laws(s: Series, name: str) -> Table:
    most = max(row.ranks for row in drop_failed(s.rows))
    head = ("law", "parameters", "off by", f"on {2 * most}", f"on {4 * most}", "ceiling")
    table = Table(*head, left=2, name="fits", title=f"Beyond what was measured{name}")
    for law in s.laws:
        values = ", ".join(f"{key} {number(value, 3)}" for key, value in law.parameters.items())
        points = [law.beyond(ranks) for ranks in (2 * most, 4 * most)]
        bands = [
            f"{format_speedup(p.speedup)} ({number(p.low, 3)} to {number(p.high, 3)})" if p else UNKNOWN for p in points
        ]
        ceiling = f"at most {format_speedup(law.ceiling_high)}" if law.ceiling_high else UNKNOWN
        table.add_row(law.name, values, percent(law.error), *bands, ceiling)
    return table


def _build_runs(contents: ReportContents) -> Table:
    head = ("run", "status", "ranks", "steps", "first loss", "last loss", "evaluation")
    table = Table(*head, left=2, name="runs", title="Runs")
    for run in contents.runs:
        table.add_row(
            run.name,
            run.status,
            str(run.ranks),
            f"{len(run.points):,}",
            number(run.points[0].loss),
            number(run.summary.loss_last if run.summary is not None else run.points[-1].loss),
            format_metrics(run.summary.evaluation.metrics if run.summary is not None else {}) or UNKNOWN,
        )
    return table


def build_experiments_table(found: Experiments) -> Table:
    keys, metric = found.keys[:MAX_KEYS], found.score or "score"
    note = f"The best {found.score} of each run. " if found.score else ""
    table = Table(
        *("run", "status", *keys, metric, "at step", "last loss", "samples/s", "took"),
        left=2 + len(keys),
        name="experiments",
        title="What changed, and what came of it",
        note=(note + describe_other_keys(found)).strip(),
        mark=True,
    )
    for place, (run, score, values) in enumerate(zip(found.runs, found.scores, found.values, strict=True)):
        summary = run.summary
        table.add_row(
            run.name,
            run.status,
            *values[:MAX_KEYS],
            number(score.value) if score else UNKNOWN,
            f"{score.step:,}" if score and score.step is not None else UNKNOWN,
            number(summary.loss_last if summary else run.points[-1].loss),
            number(summary.samples_per_s, 3) if summary and summary.samples_per_s else UNKNOWN,
            duration(summary.seconds) if summary else UNKNOWN,
            chosen=place == found.best,
        )
    return table


def _build_classes(event: Mapping[str, Any]) -> Iterator[Table]:
    results, left = select_class_results(event)
    if not results:
        return
    notes = [words] if (words := describe_baseline(event)) else []
    notes += [f"{left:,} more are in summary.json; these have the lowest F1"] if left else []
    note = "".join(f"{words[0].upper()}{words[1:]}. " for words in notes).rstrip()
    head = ("class", "precision", "recall", "F1", "samples")
    classes = Table(*head, name="classes", title="Results of each class", note=note)
    for result in results:
        classes.add_row(*result.cells())
    yield classes
    if not left and (confusion := event.get("confusion")):
        names = [result.name for result in results]
        note = "A row for each class, a column for what its samples were taken for."
        matrix = Table("", *names, name="confusion", title="Confusion matrix", note=note)
        for name, row in zip(names, confusion, strict=False):
            matrix.add_row(name, *map(number, row))
        yield matrix


@dataclass(frozen=True, repr=False)
class Report(Tabular):
    folder: Path
    contents: ReportContents
    figures: tuple[str, ...]

    @property
    def headline(self) -> str:
        return f"{self.page}: {self.contents.verdict[0]}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        """Those of the first table of the page, as they are shown."""
        first = next(iter(build_tables(self.contents)), None)
        return [dict(zip(first.head, row, strict=True)) for row in first.rows] if first is not None else []

    @property
    def page(self) -> Path:
        return self.folder / "report.html"


def report(
    inputs: Sequence[str | Path], out: str | Path = "report", *, title: str = "", price: float | None = None
) -> Report:
    """Write report.html, report.md, report.tex, figures/ and tables/ into `out`.

    `inputs` are runs, measurements, tables of times, or folders of runs; `price` is in USD per device and hour.
    """
    folder = Path(out)
    contents = gather_contents([Path(path) for path in inputs], title, price)
    shown = build_charts(contents, folder)
    try:
        for part in ("figures", "tables"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        drawn = draw_figures(shown, folder / "figures")
        cells = build_tables(contents)
        tiles, pictures = build_tiles(contents), list_pictures(contents.runs)
        write_atomic(folder / "report.html", render_page(contents, shown, cells, tiles=tiles, pictures=pictures))
        write_atomic(folder / "report.md", render_markdown(contents, shown, cells))
        write_atomic(folder / "report.tex", render_latex(contents, shown, cells))
        write_tables(cells, folder / "tables")
    except (OSError, RunFailed) as error:
        raise UserError(f"--out: {folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return Report(folder, contents, tuple(drawn))


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    names = Counter[str]()
    for table in tables:
        names[table.name] += 1
        number = f"-{names[table.name]}" if names[table.name] > 1 else ""
        write_atomic(folder / f"{table.name}{number}.csv", table.to_csv())
