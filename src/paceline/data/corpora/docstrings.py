"""The corpus that is on every machine: docstrings of numpy, scipy, torch and the standard library, by package.

They are read with `ast` from the installed source files, without package names and doctests.
"""

import ast
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from paceline.data.files import hash_text, invalid_data, iter_below
from paceline.errors import not_installed

CLASSES = ("numpy", "scipy", "torch", "standard library")
EXTRACTION = 1  # raise it when a change below changes the texts: cached corpora are named by it

MIN_WORDS = 10
ENOUGH_PER_CLASS = 1_800  # files are read in a fixed, shuffled order until a class has this many
MAX_TRAIN_PER_CLASS = 1_500
MAX_FILE_BYTES = 400_000  # larger ones are generated tables: slow to parse, few docstrings

# Tests describe themselves, not the package; the rest is no Python of the package or a second copy of something.
NOT_READ = {
    *("__pycache__", "site-packages", "dist-packages", "include", "lib", "bin", "share"),
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"),
}
NAMES = re.compile(r"numpy|scipy|(?:py)?torch|c?python|stdlib|\b(?:np|sp|aten)\b", re.IGNORECASE)
ADDS_A_DOCSTRING = {"add_newdoc", "add_docstr"}  # how numpy and torch document what is written in C

Sample = tuple[str, int]
Clean = Callable[[str], str]


def list_source_versions() -> dict[str, str]:
    versions = {name: metadata.version(name) for name in CLASSES[:3] if _find_package_folder(name)}
    return {**versions, "python": platform.python_version(), "extraction": str(EXTRACTION)}


def extract_samples(test_fraction: float, clean: Clean) -> tuple[list[Sample], list[Sample]]:
    """Return (training, test) samples: as many of each class, and all docstrings of a module on the same side.

    `clean` is applied to each docstring.
    """
    seen: set[str] = set()
    splits = [split_by_module(_modules(name, seen, clean), test_fraction) for name in CLASSES]
    train_per_class = min(MAX_TRAIN_PER_CLASS, *(len(train) for train, _ in splits))
    wanted = round(train_per_class * test_fraction / (1 - test_fraction))
    test_per_class = min(wanted, *(len(test) for _, test in splits))
    if not train_per_class or not test_per_class:
        raise invalid_data(f"data.test_fraction={test_fraction}: too few docstrings are installed; use 0.05 to 0.5")
    train = _shuffle(texts[:train_per_class] for texts, _ in splits)
    return train, _shuffle(texts[:test_per_class] for _, texts in splits)


def mask_names(docstring: str) -> str:
    """Return the docstring in one line, without doctests and the names that give the package away."""
    kept: list[str] = []
    in_doctest = False
    for line in docstring.splitlines():
        line = line.strip()
        # A doctest and its output end at the next blank line.
        in_doctest = bool(line) and (in_doctest or line.startswith(">>>"))
        if not in_doctest and not line.startswith("..."):
            kept.append(line)
    return " ".join(NAMES.sub(" ", " ".join(kept)).split())


def iter_docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # templates and deliberate nonsense carry the suffix .py too
        return
    pending: list[ast.stmt | ast.Module] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node, clean=False):
                yield docstring
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in ADDS_A_DOCSTRING:
                parts = (part for argument in node.value.args[1:] for part in ast.walk(argument))
                yield from (p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))
        for block in ("orelse", "body"):
            pending.extend(reversed(getattr(node, block, ())))


def _find_package_folder(name: str) -> Path:
    if name == "standard library":
        return Path(sysconfig.get_path("stdlib"))
    spec = find_spec(name)  # finds a top-level package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise not_installed("data.source=docstrings", name)
    return Path(spec.submodule_search_locations[0])


def _modules(name: str, seen: set[str], clean: Clean) -> list[list[str]]:
    """Return the cleaned docstrings of the modules of a package, each once."""
    modules: list[list[str]] = []
    root, count = _find_package_folder(name), 0
    below = iter_below(root, lambda name: name not in NOT_READ)
    files = [file for file in below if file.suffix == ".py" and file.stat().st_size <= MAX_FILE_BYTES]
    for file in sorted(files, key=lambda file: hash_text(f"{name}/{file.relative_to(root).as_posix()}")):
        if count >= ENOUGH_PER_CLASS:
            break
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        cleaned = dict.fromkeys(map(clean, iter_docstrings(source)))
        texts = [text for text in cleaned if text.count(" ") >= MIN_WORDS - 1 and text not in seen]
        seen.update(texts)
        if texts:
            modules.append(texts)
            count += len(texts)
    if not modules:
        raise invalid_data(f"data.source=docstrings: {root} has no Python source files; use another data.source")
    return modules


def split_by_module(modules: list[list[str]], test_fraction: float) -> tuple[list[str], list[str]]:
    """Assign whole modules, in their shuffled order, to the test side as long as they fit into its share."""
    wanted = test_fraction * sum(len(texts) for texts in modules)
    train: list[str] = []
    test: list[str] = []
    for texts in modules:
        (test if len(test) + len(texts) <= wanted else train).extend(texts)
    return sorted(train, key=hash_text), sorted(test, key=hash_text)


def _shuffle(texts_per_class: Iterable[list[str]]) -> list[Sample]:
    samples = [(text, label) for label, texts in enumerate(texts_per_class) for text in texts]
    return sorted(samples, key=lambda sample: hash_text(sample[0]))
