"""The verb `report`: run folders, measurements and tables of times in; a page, figures, Markdown and LaTeX out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError
from paceline.io.files import write_atomic
from paceline.io.table import Table, Tabular
from paceline.reports.charts import build_charts
from paceline.reports.contents import ReportContents, gather_contents
from paceline.reports.figures import draw_figures
from paceline.reports.page import render_latex, render_markdown, render_page
from paceline.reports.tables import build_tables


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
    _make_folder(folder / "figures")
    shown = build_charts(contents, folder)
    try:
        drawn = draw_figures(shown, folder / "figures")
        cells = build_tables(contents)
        write_atomic(folder / "report.html", render_page(contents, shown, cells))
        write_atomic(folder / "report.md", render_markdown(contents, shown, cells))
        write_atomic(folder / "report.tex", render_latex(contents, shown, cells))
        write_tables(cells, folder / "tables")
    except (OSError, RunFailed) as error:
        raise UserError(f"--out: {folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return Report(folder, contents, tuple(drawn))


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    _make_folder(folder)
    names = Counter[str]()
    for table in tables:
        names[table.name] += 1
        number = f"-{names[table.name]}" if names[table.name] > 1 else ""
        write_atomic(folder / f"{table.name}{number}.csv", table.to_csv())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".try").touch()
        (folder / ".try").unlink()
    except OSError as error:
        raise UserError(f"--out: {folder.parent} cannot be written: {error.strerror}") from None
