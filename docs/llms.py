"""Write llms.txt: the pages of the documentation with the first sentence of each.

python docs/llms.py
"""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "llms.txt"
HEAD = """# Paceline

> Know before you scale, scale without rewriting, prove that it paid: a Python toolkit for distributed training. One run
> file (YAML) goes through plan, train, measure and report, on one CPU core or many nodes, with the same answer.

"""


def page() -> str:
    """Return the text of llms.txt, in the order of the site's navigation."""
    navigation = (REPOSITORY / "zensical.toml").read_text(encoding="utf-8")
    listed = re.findall(r'= "([\w/]+\.md)"', navigation)
    pages = [REPOSITORY / "docs" / name for name in listed]
    return HEAD + "".join(f"- {_describe(file)}\n" for file in pages if file.is_file())


def _describe(file: Path) -> str:
    title, _, text = file.read_text(encoding="utf-8").partition("\n")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraph = next(part for part in text.split("\n\n") if re.match(r"\s*[A-Z`*]", part))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return f"[{title.lstrip('# ')}]({file.relative_to(REPOSITORY)}): {re.split(r'(?<=[.])[ ]', plain)[0]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
