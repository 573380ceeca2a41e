"""Build the documentation site from the pages of the repository.

python docs/site.py

Pages link to files beside docs/ (tests, recipes, LICENSE). Those files are copied into the site, so that every link
works offline and in any copy of it. The build is strict: a broken link or anchor ends it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STAGED = REPOSITORY / "build" / "docs"
SITE = REPOSITORY / "build" / "site"
WORKER = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads for its search in pages that are opened as files."""
SOURCES = "repository"
"""Folder of the site with files of the repository that pages link to."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
SHOWN_AS_TEXT = {".py", ".yaml", ".toml", ".json", ""}
"""Kinds of files that get the ending .txt: browsers show those, and download most others."""
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}


def stage_pages() -> None:
    """Copy docs/ and the pages beside it to build/docs, with every file of the repository that they link to."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(REPOSITORY / "docs", STAGED, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    originals = sorted(REPOSITORY.glob("docs/**/*.md")) + [REPOSITORY / name for name in ROOT_PAGES]
    for original in originals:
        page = locate(original)
        page.write_text(relink_page(page, original), encoding="utf-8")


def locate(file: Path) -> Path:
    """Return where a file of the repository is staged."""
    if file.parent == REPOSITORY and file.name in ROOT_PAGES:
        return STAGED / ROOT_PAGES[file.name]
    if file.is_relative_to(REPOSITORY / "docs"):
        place = STAGED / file.relative_to(REPOSITORY / "docs")
    else:
        place = STAGED / SOURCES / file.relative_to(REPOSITORY)
    return place.with_name(f"{place.name}.txt") if place.suffix in SHOWN_AS_TEXT else place


def relink_page(page: Path, original: Path) -> str:
    """Return the text of a staged page, with links that start where the page now is."""
    parts = CODE.split(original.read_text(encoding="utf-8"))
    for index in range(0, len(parts), 2):  # the odd ones are blocks of code
        parts[index] = LINK.sub(lambda match: match[1] + relink(match[2], page, original) + match[3], parts[index])
    return "".join(parts)


def relink(target: str, page: Path, original: Path) -> str:
    """Return where a link of a staged page leads, and copy its file there if it is not a page."""
    if re.match(r"[a-z]+:", target):
        return target
    file = (original.parent / target).resolve()
    place = locate(file)
    if not place.exists() and file.suffix != ".md":
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return Path(os.path.relpath(place, page.parent)).as_posix()


def fill_reference() -> None:
    """Fill what the reference pages leave open, from the package beside docs/."""
    sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "docs")]
    from reference import fill_page

    for page in map(STAGED.joinpath, ("cli.md", "keys.md", "api.md")):
        page.write_text(fill_page(page.read_text(encoding="utf-8")), encoding="utf-8")


def add_gallery() -> None:
    """Put what `make gallery` has left below its commands, and its pages into the site."""
    from gallery import BUILT, list_sections, name_folder

    page = STAGED / "gallery.md"
    text = page.read_text(encoding="utf-8")
    for title, commands in list_sections():
        folder = BUILT / (name := name_folder(title))
        if (folder / "page" / "report.html").is_file():
            (STAGED / "gallery").mkdir(exist_ok=True)
            shutil.copy(folder / "page" / "report.html", STAGED / "gallery" / f"{name}.html")
            lines = (folder / "output.txt").read_text(encoding="utf-8").splitlines()
            shown = "\n".join(line for line in lines if "  eta " not in line) + "\n"  # not the progress of a log
            text = text.replace(commands, f"{commands}```\n\n[The page](gallery/{name}.html)\n\n```text\n{shown}", 1)
    page.write_text(text, encoding="utf-8")


def take_search_from_site() -> None:
    """Make every page load the worker of its search from the site, so that search works offline."""
    for page in SITE.rglob("*.html"):
        worker = Path(os.path.relpath(SITE / "assets" / "iframe-worker.js", page.parent)).as_posix()
        page.write_text(page.read_text(encoding="utf-8").replace(WORKER, worker), encoding="utf-8")


if __name__ == "__main__":
    stage_pages()
    fill_reference()
    add_gallery()
    zensical = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict", "-f", "zensical.toml"]
    if code := subprocess.run(zensical, cwd=REPOSITORY).returncode:
        sys.exit(code)
    take_search_from_site()
    print(f"built {SITE / 'index.html'}")
