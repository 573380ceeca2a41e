"""Render the report as one HTML page, as Markdown, and as a LaTeX article that a stock TeX compiles."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.config.registry import BUILT_IN, find_entry, import_object
from paceline.errors import UserError
from paceline.io.escape import escape_hidden
from paceline.io.files import open_regular, read_bytes
from paceline.io.html_page import build_content_policy, compile_template, dump_page_data
from paceline.io.table import Table
from paceline.reports.charts import Chart
from paceline.reports.contents import ReportContents
from paceline.reports.run_view import RunView
from paceline.runlog.run_dir import RunDir

MOST_PICTURE_RUNS = 4
PNG = b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Picture:
    run: str
    name: str
    step: int
    file: Path

    @property
    def caption(self) -> str:
        return f"{self.run}, {self.name.replace('_', ' ')}, step {self.step:,}"

    @property
    def is_figure(self) -> bool:
        """Return whether matplotlib drew it, on white: a dark page turns its colours round."""
        return b"Matplotlib" in read_bytes(self.file)[:256]

    @property
    def address(self) -> str:
        return "data:image/png;base64," + base64.b64encode(read_bytes(self.file)).decode()


def list_pictures(runs: Sequence[RunView]) -> list[Picture]:
    found = []
    for run in runs[:MOST_PICTURE_RUNS]:
        found += _list_run_pictures(run.name, run.spec.workload, run.path)
        for file in sorted(run.path.glob("members/*/spec.yaml")):  # of an ensemble
            with suppress(UserError):
                workload = RunDir(file.parent).recorded_spec().workload
                found += _list_run_pictures(f"{run.name}, {file.parent.name}", workload, file.parent)
    return found


def _list_run_pictures(name: str, workload: str, folder: Path) -> list[Picture]:
    if workload in BUILT_IN and (draw := find_entry(workload).draw):
        import_object(draw)(folder)
    by_name: dict[str, list[Picture]] = {}
    for file in sorted(RunDir(folder).pictures.glob("*.png")):
        if (found := re.fullmatch(r"(\w.*)-(\d{1,18})", file.stem)) and _is_own_picture(file, folder):
            by_name.setdefault(found[1], []).append(Picture(name, found[1], int(found[2]), file))
    series = [sorted(some, key=lambda picture: picture.step) for some in by_name.values()]
    return [picture for some in series for picture in (some if len(some) < 2 else (some[0], some[-1]))]


def _is_own_picture(file: Path, folder: Path) -> bool:
    """Return whether it is a PNG inside the run folder; a link could add any file to a page that is shared."""
    if not file.resolve().is_relative_to(folder.resolve()):
        return False
    try:
        with open_regular(file) as content:
            return content.read(len(PNG)) == PNG and file.stat().st_size <= MOST_BYTES
    except OSError:
        return False


ASSETS = Path(__file__).parent / "assets"
Parts = Mapping[str, Sequence[str]]
"""Names of charts and tables in their order, by heading."""
ORDER: Parts = {
    "": (
        *("models", "costs", "scaling", "breakdown", "epochs", "experiments", "members", "evaluation"),
        *("loss", "difference", "classes", "confusion"),
        *("pictures", "rate", "compute", "lr", "gradient", "usage", "memory", "benefit", "runs"),
    )
}
"""The story of a page: does it pay, why, is it the same training, what does it take."""
RUN_ORDER: Parts = {
    "Result": ("members", "classes", "confusion", "pictures", "evaluation"),
    "How it was trained": ("loss", "lr", "gradient"),
    "Speed": ("epochs", "rate", "compute", "usage", "memory"),
}
"""The same of one run."""
TEX_DELIMITERS = {
    f"{part}_{side}_string": sign
    for part, signs in {"block": ("<%", "%>"), "variable": ("<<", ">>"), "comment": ("<#", "#>")}.items()
    for side, sign in zip(("start", "end"), signs, strict=True)
}


class PageHead(NamedTuple):
    """The head of a page that is not a report: what a template does not find is not shown."""

    title: str
    verdict: Sequence[str]
    made: str = f"paceline {__version__}"
    command: str = ""
    """The line to type next."""
    refresh: int = 0
    """Seconds after which a browser loads the page again."""


def render_page(
    contents: ReportContents | PageHead,
    charts: Sequence[Chart],
    tables: Sequence[Table],
    *,
    parts: Parts = ORDER,
    pictures: Sequence[Picture] = (),
    folder: Path = Path(),
) -> str:
    """Render charts and tables in their order, below the verdict; addresses are relative to `folder`."""
    from markupsafe import Markup

    lines = read_asset("chart.umd.min.js").splitlines()
    library = "\n".join(line for line in lines if "sourceMappingURL" not in line).replace("</script", "<\\/script")
    script = read_asset("page.js")
    page: str = compile_template(read_asset("page.html.j2")).render(
        contents=contents,
        charts=charts,
        tables=tables,
        pictures=pictures,
        parts=parts,
        folder=folder,
        data=Markup(dump_page_data({chart.name: chart.data for chart in charts})),
        library=Markup(library),
        script=Markup(script),
        policy=build_content_policy(library, script),
        style=Markup(read_asset("page.css")),
    )
    return page


@cache
def read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def render_markdown(
    contents: ReportContents, charts: Sequence[Chart], tables: Sequence[Table], folder: Path = Path()
) -> str:
    made = compile_template(
        read_asset("report.md.j2"), html=False, value=_escape_markdown, cell=lambda text: str(text).replace("|", "\\|")
    )
    text = made.render(contents=contents, charts=charts, tables=tables, folder=folder)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _escape_markdown(value: Any) -> str:
    """Return text without HTML, links, pictures and line breaks for Markdown."""
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", escape_hidden(" ".join(str(value).split("\n"))))
    return re.sub(r"\](?=[(\[:])", r"]\\", text)


def render_latex(contents: ReportContents, charts: Sequence[Chart], tables: Sequence[Table]) -> str:
    made = compile_template(read_asset("report.tex.j2"), html=False, signs=TEX_DELIMITERS, tex=escape_tex)
    return str(made.render(contents=contents, charts=charts, tables=tables))


def escape_tex(text: str) -> str:
    """Return text in which TeX sees no command; letters that it has no font for become ?."""
    escapes = json.loads(read_asset("tex_escapes.json"))
    found = "".join(" " if sign.isspace() else escapes.get(sign, sign) for sign in escape_hidden(str(text)))
    return found.encode("latin-1", "replace").decode("latin-1")
