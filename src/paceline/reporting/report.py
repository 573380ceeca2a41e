"""The verb `report`: run folders, measurements and tables of times in; a page, figures, Markdown and LaTeX out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunFailed, UserError
from paceline.record.files import write_atomic
from paceline.reporting.charts import charts
from paceline.reporting.contents import Contents, gather
from paceline.reporting.figures import draw_figures
from paceline.reporting.page import page
from paceline.reporting.tables import tables
from paceline.reporting.texts import latex, markdown


@dataclass(frozen=True)
class Report:
    folder: Path
    contents: Contents
    figures: tuple[str, ...]

    @property
    def page(self) -> Path:
        return self.folder / "report.html"


def report(
    inputs: Sequence[str | Path], out: str | Path = "report", *, title: str = "", price: float | None = None
) -> Report:
    """Write report.html, report.md, report.tex and figures/ into `out`; `price` is in USD per device and hour."""
    folder = Path(out)
    contents = gather([Path(path) for path in inputs], title, price)
    _make(folder / "figures")
    shown = charts(contents, folder)
    try:
        drawn = draw_figures(shown, folder / "figures")
        cells = tables(contents)
        write_atomic(folder / "report.html", page(contents, shown, cells, figures=True))
        write_atomic(folder / "report.md", markdown(contents, shown, cells, figures=True))
        write_atomic(folder / "report.tex", latex(contents, shown, cells, figures=True))
    except (OSError, RunFailed) as error:
        raise UserError(f"--out: {folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return Report(folder, contents, tuple(drawn))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".try").touch()
        (folder / ".try").unlink()
    except OSError as error:
        raise UserError(f"--out: {folder.parent} cannot be written: {error.strerror}") from None
