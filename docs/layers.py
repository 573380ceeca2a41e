"""Draws docs/images/layers.svg, the layers of the package, from its imports.

    python docs/layers.py

A package stands above all that it imports, lazily or not. Arrows that follow from others are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
PICTURE = Path(__file__).parent / "images" / "layers.svg"
WIDTH, BOX, ROW = 960, 26, 62
Graph = dict[str, set[str]]


def imports(package: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """(module, what it imports) for every import in the package, lazy ones included; not those for types alone."""
    for file in sorted(package.rglob("*.py")):
        module = ".".join(["paceline", *file.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        skipped = {id(inner) for outer in for_types for inner in ast.walk(outer)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names if alias.name.startswith("paceline."))
            elif isinstance(node, ast.ImportFrom) and id(node) not in skipped:
                name = node.module or ""
                is_package = (PACKAGE / Path(*name.split(".")[1:])).is_dir()
                names = [f"{name}.{alias.name}" for alias in node.names] if is_package else [name]
                yield from ((module, name) for name in names if name.startswith("paceline."))


def graph_of(found: Iterable[tuple[str, str]], depth: int = 1) -> Graph:
    """What each package imports of the others."""
    graph: Graph = {}
    known = {path.stem for path in PACKAGE.iterdir()}
    for module, name in found:
        here, there = (".".join(m.split(".")[1 : 1 + depth]) for m in (module, name))
        if here and there.split(".")[0] in known and here != there:
            graph.setdefault(here, set()).add(there)
    return graph


def levels(graph: Graph) -> list[list[str]]:
    """The packages, lowest first; each as low as what it imports lets it be."""
    height: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        height[name] = 1 + max((height[below] for below in graph.get(name, ())), default=-1)
    return [sorted(n for n, h in height.items() if h == level) for level in range(max(height.values()) + 1)]


def needed(graph: Graph) -> Iterator[tuple[str, str]]:
    """The arrows that do not follow from others."""
    below: Graph = {}
    for name in TopologicalSorter(graph).static_order():
        below[name] = set().union(*({b} | below[b] for b in graph.get(name, ())))
    for name, direct in graph.items():
        yield from ((name, b) for b in sorted(direct) if not any(b in below[other] for other in direct))


def picture() -> str:
    graph = {name: below - {"errors"} for name, below in graph_of(imports()).items() if name != "__main__"}
    rows = levels(graph)[::-1]
    at, size = {}, {}
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            size[name] = 18 + 8 * len(name)
            at[name] = (WIDTH * (x + 1) / (len(row) + 1), 24 + ROW * y)
    lines = [
        f'<line x1="{at[a][0]:.0f}" y1="{at[a][1] + BOX / 2:.0f}" x2="{at[b][0]:.0f}" y2="{at[b][1] - BOX / 2:.0f}"/>'
        for a, b in sorted(needed(graph))
    ]
    boxes = [
        f'<rect x="{x - size[n] / 2:.0f}" y="{y - BOX / 2:.0f}" width="{size[n]}" height="{BOX}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + 4.5:.0f}">{n}</text>'
        for n, (x, y) in at.items()
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(rows)}">',
            "<title>Packages of Paceline: each stands above what it imports; all import errors</title>",
            "<style>rect{fill:#f4f6f8;stroke:#44566c}line{stroke:#9fb0c3}"
            "text{font:13px monospace;text-anchor:middle;fill:#1d2733}</style>",
            f'<rect x="0" y="0" width="{WIDTH}" height="{ROW * len(rows)}" style="fill:#fff;stroke:none"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
