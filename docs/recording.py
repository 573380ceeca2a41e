"""Draw docs/images/first_minute.svg: what two commands print, run as they stand, in a terminal of 100 columns.

python docs/recording.py
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE = REPOSITORY / "docs" / "images" / "first_minute.svg"
COLUMNS, LINES = 100, 18
SCRIPT = REPOSITORY / "docs" / "examples" / "moving" / "ddp_before.py"
COMMANDS = (
    "paceline measure --ranks 1,2 --repeats 2 -- python train.py",
    "paceline plan recipes/lm_7b.yaml --cluster 4x24GB",
)


def record(command: str, folder: Path) -> Text:
    """Run a command, and return its prompt and the first lines of what it printed."""
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    lines = done.stdout.rstrip().splitlines()
    shown = [*lines[:LINES], *(["…"] if len(lines) > LINES else []), ""]
    return Text.assemble((f"$ {command}\n", "bold"), "\n".join(shown))


def draw_picture() -> str:
    """Return the picture as SVG; no font is loaded from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipes").symlink_to(REPOSITORY / "recipes")
        (folder / "train.py").write_bytes(SCRIPT.read_bytes())
        for command in COMMANDS:
            console.print(record(command, folder))
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="paceline"), flags=re.DOTALL)


if __name__ == "__main__":
    PICTURE.write_text(draw_picture(), encoding="utf-8")
