"""Write docs/files.md: every module of the package with the first sentence of its docstring.

python docs/tree.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).with_name("files.md")
PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
COLUMN = 34


def tree(folder: Path = PACKAGE, depth: int = 0) -> list[str]:
    """A line for the folder, one for each of its modules, and the same for the folders inside."""
    head = f"{'  ' * depth}{'src/paceline' if folder == PACKAGE else folder.name}/"
    lines = [_line(head, folder / "__init__.py")]
    modules = sorted(f for f in folder.glob("*.py") if not f.name.startswith("__"))
    lines += [_line(f"{'  ' * (depth + 1)}{file.name}", file) for file in modules]
    for inside in sorted(f for f in folder.iterdir() if (f / "__init__.py").exists()):
        lines += tree(inside, depth + 1)
    return lines


def page() -> str:
    """The whole page."""
    head = "# Files\n\nWritten by `python docs/tree.py`; [architecture.md](architecture.md) tells the story."
    return "\n".join([head, "", "```", *tree(), "```", ""])


def _line(head: str, file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    return f"{head:{COLUMN}} {re.split(r'(?<=[.;])[ ]', first)[0].rstrip('.;')}".rstrip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
