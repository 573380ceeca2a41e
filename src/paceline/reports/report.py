"""Report: runs, measurements and tables of times in; a page, figures, Markdown, LaTeX and CSV out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.registry import BUILT_IN, find_entry, import_object
from paceline.errors import RunFailed, UserError
from paceline.io.files import write_atomic
from paceline.io.format import duration, number
from paceline.io.table import UNKNOWN, Table, Tabular
from paceline.measurement.tables import build_measurement_tables, format_known
from paceline.reports.charts import build_charts
from paceline.reports.comparisons import build_costs_table, build_models_table
from paceline.reports.contents import ReportContents, gather_contents
from paceline.reports.figures import draw_figures
from paceline.reports.page import (
    ORDER,
    RUN_ORDER,
    list_pictures,
    render_latex,
    render_markdown,
    render_page,
)
from paceline.reports.run_view import MAX_KEYS, Experiments, describe_other_keys, parse_warmup
from paceline.runlog.summary import Score, Summary, describe_baseline, find_score, select_class_results


def build_tables(contents: ReportContents) -> list[Table]:
    found = [build_models_table(contents.layouts, contents.runs)] if len(contents.layouts) > 1 else []
    found += [build_costs_table(contents.costs)] if contents.costs else []
    for s in contents.series:
        name = f": {s.name}" if len(contents.series) > 1 else ""
        found += build_measurement_tables(s, name)
    if contents.experiments is not None:
        found.append(build_experiments_table(contents.experiments))
    elif contents.runs:
        rows = [RunRow(run.name, run.status, run.summary, run.points[-1].loss) for run in contents.runs]
        found.append(build_runs_table(rows, name="runs", title="Runs"))
    if len(contents.runs) == 1 and (ended := contents.runs[0].summary) is not None:
        run = contents.runs[0]
        if run.spec.workload in BUILT_IN and (build := find_entry(run.spec.workload).tables):
            found += import_object(build)(run.path)
        found += _build_classes({**ended.evaluation.metrics, **ended.evaluation.arrays})
        if load := ended.evaluation.arrays.get("expert_load"):
            found.append(_build_experts(load))
    return found


class RunRow(NamedTuple):
    """What a table of runs has a row for."""

    name: str
    status: str
    summary: Summary | None
    last_loss: float | None = None
    """Of a run that has not ended."""
    path: Path = Path()
    workload: str = ""
    problem: str = ""
    """Why it cannot be read."""


def build_runs_table(
    runs: Sequence[RunRow],
    keys: Mapping[str, Sequence[str]] | None = None,
    *,
    brief: bool = False,
    best: int | None = None,
    **texts: str,
) -> Table:
    """Build a row for each run, with the values of `keys`; if `brief`, without columns in which all runs agree."""
    scores = [find_score(run.summary) for run in runs]
    titles = {score.title for score in scores if score is not None}
    title = titles.pop() if len(titles) == 1 else "score"
    left = {"run": [run.name for run in runs], "status": [run.status for run in runs], **(keys or {})}
    numbers = [_format_run(run, score, title) for run, score in zip(runs, scores, strict=True)]
    columns = left | {name: [row[name] for row in numbers] for name in (numbers[0] if numbers else ())}
    if brief:  # keys have the ranks and the length
        wanted = [name for name in columns if name not in ("ranks", "steps")]
        columns = {n: columns[n] for n in wanted if n in ("run", title) or len(set(columns[n])) > 1}
    table = Table(*columns, left=len(left.keys() & columns.keys()), mark=best is not None, **texts)
    for place, cells in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells, chosen=place == best)
    return table


def _format_run(run: RunRow, score: Score | None, title: str) -> dict[str, str]:
    ended = run.summary or Summary()
    loss = run.last_loss if run.summary is None else ended.loss_last
    return {
        title: _format_score(score, title),
        "at step": f"{score.step:,}" if score and score.step is not None else UNKNOWN,
        "ranks": f"{ended.ranks:,}" if ended.ranks else UNKNOWN,
        "steps": f"{ended.trained.steps:,}" if ended.trained.steps else UNKNOWN,
        "last loss": format_known(number, loss),
        "samples/s": format_known(number, ended.samples_per_s or None, 3),
        "took": format_known(duration, ended.seconds or None),
    }


def _format_score(score: Score | None, title: str) -> str:
    if score is None:
        return UNKNOWN
    return number(score.value) if score.title == title else f"{score.name} {number(score.value)} {score.title[-1]}"


def build_experiments_table(found: Experiments) -> Table:
    """Build the comparison of runs: what differs, and what came of it."""
    rows = [RunRow(run.name, run.status, run.summary, run.points[-1].loss) for run in found.runs]
    keys = {key: [values[place] for values in found.values] for place, key in enumerate(found.keys[:MAX_KEYS])}
    note = " ".join(filter(None, ("The best score of each run." * bool(found.score), describe_other_keys(found))))
    title = "What changed, and what came of it"
    return build_runs_table(
        rows, keys, brief=True, best=None if found.tied else found.best, name="experiments", title=title, note=note
    )


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


def _build_experts(load: Sequence[Sequence[float]]) -> Table:
    """Build the shares of held-out tokens that the experts of each layer got."""
    note = "Share of the tokens, as a multiple of an equal share: 1 is balanced."
    experts = Table("mixture", "experts", "busiest", "least busy", name="experts", title="Load of experts", note=note)
    for index, shares in enumerate(load):
        several = len(shares)
        experts.add_row(str(index), number(several), number(max(shares) * several), number(min(shares) * several))
    return experts


@dataclass(frozen=True, repr=False)
class Report(Tabular):
    folder: Path
    contents: ReportContents
    figures: tuple[str, ...]

    @property
    def headline(self) -> str:
        return f"{self.page}: {self.contents.verdict[0]}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        """Return the rows of the first table of the page, as they are shown."""
        first = next(iter(build_tables(self.contents)), None)
        return [dict(zip(first.head, row, strict=True)) for row in first.rows] if first is not None else []

    @property
    def page(self) -> Path:
        return self.folder / "report.html"


def report(
    inputs: Sequence[str | Path],
    out: str | Path = "report",
    *,
    title: str = "",
    price: float | None = None,
    warmup: str = "",
    only: str = "",
) -> Report:
    """Write report.html, report.md, report.tex, figures/ and tables/ into `out`.

    `inputs` are runs, measurements, tables of times, or folders of runs; `price` is in USD per device and hour. Of a
    `warmup` of "1" epoch or "50 steps" no speed is taken; `only` is a pattern of the names to read from a folder.
    """
    folder = Path(out)
    contents = gather_contents([Path(path) for path in inputs], title, price, parse_warmup(warmup), only)
    shown = build_charts(contents)
    try:
        for part in ("figures", "tables"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        drawn = draw_figures(shown, folder / "figures")
        cells = build_tables(contents)
        answers = [table.answer for table in cells if table.answer]
        contents = replace(contents, verdict=(*answers, *contents.verdict))
        names = {table.name for table in cells}  # a picture of a table says the same
        pictures = [p for p in list_pictures(contents.runs) if p.name not in names]
        parts = RUN_ORDER if contents.command else ORDER
        page = render_page(contents, shown, cells, parts=parts, pictures=pictures, folder=folder)
        write_atomic(folder / "report.html", page)
        write_atomic(folder / "report.md", render_markdown(contents, shown, cells, folder))
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
