"""Run the commands of docs/gallery.md as they stand there, for the site.

python docs/gallery.py DATA_FOLDER [WORD]

Leaves a folder for each section in build/gallery: output.txt, and page/report.html. WORD picks sections by title.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUILT = REPOSITORY / "build" / "gallery"
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def list_sections() -> list[tuple[str, str]]:
    """Return the titles of the page, each with its commands."""
    text = (REPOSITORY / "docs" / "gallery.md").read_text(encoding="utf-8")
    return [(title, re.findall(r"```bash\n(.*?)```", body, re.DOTALL)[0]) for title, body in SECTION.findall(text)]


def name_folder(title: str) -> str:
    return "-".join(re.findall(r"\w+", title.lower())[:3])


def run_section(title: str, commands: str, data: Path) -> str:
    """Run the commands in a folder of their own, and return how they ended."""
    if "paceline submit" in commands and not shutil.which("sbatch"):
        return "left out: there is no Slurm here"
    folder = BUILT / name_folder(title)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "page").mkdir(parents=True)
    for name, target in (("data", data), ("recipes", REPOSITORY / "recipes"), ("docs", REPOSITORY / "docs")):
        (folder / name).symlink_to(target)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        for command in commands.splitlines():
            print(f"$ {command}", file=output, flush=True)
            environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
            done = subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=output)
            if done.returncode:
                return f"{command}: exit code {done.returncode}"
    return "" if (folder / "page" / "report.html").is_file() else "no page was written"


if __name__ == "__main__":
    data, word = Path(sys.argv[1]).resolve(), (sys.argv[2:] or [""])[0]
    failed = 0
    for title, commands in list_sections():
        if word in title:
            start = time.monotonic()
            ended = run_section(title, commands, data)
            failed += bool(ended) and not ended.startswith("left out")
            print(f"{title}: {ended or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(failed > 0)
