"""What the pages print is true: commands parse, links lead somewhere, tables are complete, examples run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import build_parser, list_verbs
from paceline.config import RunSpec
from paceline.config.sections import DataSection
from paceline.hardware.catalogue import load_catalogue
from paceline.script.workload import ScriptArguments

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.glob("**/*.md")])
ID = {"ids": lambda page: str(page.relative_to(REPOSITORY)) if isinstance(page, Path) else None}

PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(\.\w+)?")  # RUN.yaml, RUN_FOLDER
COMMAND = re.compile(r"(?:^|\s)(?:\S*/)?paceline +(?=[a-z-])(.+)")
TAKEN_FROM_PAGE = {"line.yaml"}  # a file that the reader saves; it has a test of its own below


@cache
def commands(page: Path) -> tuple[str, ...]:
    """The arguments of every `paceline …` of a page: lines of shell blocks, and code within a line of text."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    found = [COMMAND.search(line) for line in [*blocks.replace("\\\n", " ").splitlines(), *inline]]
    return tuple(re.split(" [#>]", match[1])[0].strip() for match in found if match)


def words_of(command: str) -> list[str]:
    """As the shell would split it, with `[optional]` parts of a synopsis taken or, where they are dots, left out."""
    command = command.split(" -- ")[0].replace("[section.key=value ...]", "")  # after it comes somebody else's
    return shlex.split(re.sub(r"\[(--[^\]]*)\]", r"\1", command).replace("…", ""))


ALL = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{p.name}: {c}" for p, c in ALL])
def test_every_command_parses(page, command, capsys):
    words = words_of(command)
    if words in (["--help"], ["--version"]) or len(words) == 1:
        assert words[0] in (*build_parser(())._subparsers._group_actions[0].choices, "--help", "--version")
        return
    try:
        arguments, extra = build_parser(words).parse_known_args(words)
    except SystemExit:
        pytest.fail(f"{page.name}: paceline {command}: {capsys.readouterr().err}")
    assert not [word for word in extra if word.startswith("-")], f"{page.name}: paceline {command}"
    given = [*getattr(arguments, "words", []), *extra]
    file = given[0] if given and "=" not in given[0] else None
    if file is None or PLACEHOLDER.fullmatch(file) or file in TAKEN_FROM_PAGE:
        return
    assert (REPOSITORY / file).is_file(), f"{page.name} names {file}, which is not there"
    paceline.load(REPOSITORY / file, [word for word in given[1:] if not PLACEHOLDER.fullmatch(word.split("=")[-1])])


@pytest.mark.parametrize("page", PAGES, **ID)
def test_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_gpu_page_is_the_catalogue():
    page = (DOCS / "gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \|" + 5 * r" ([\d.]+) \|", page, re.MULTILINE)
    catalogue = load_catalogue()
    assert len(rows) >= 12
    for name, *numbers in rows:
        found = catalogue[name]
        half = found.peak_flops_s("fp16") / 1e12
        rates = (found.bandwidth_bytes_s / 1e9, found.link_bytes_s / 1e9)
        facts = (found.memory_bytes / 1e9, half, *rates, found.usd_per_hour)
        assert [float(number) for number in numbers] == pytest.approx(facts, rel=0.01), name


def test_every_page_is_in_the_navigation():
    text = (REPOSITORY / "zensical.toml").read_text(encoding="utf-8")
    listed = re.findall(r'= "([\w/]+\.md)"', text)
    root_pages = _module(DOCS / "site.py").ROOT_PAGES
    assert sorted(listed) == sorted(
        [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")] + [*root_pages.values()]
    )


@pytest.mark.parametrize("page", PAGES, **ID)
def test_files_named_in_code_are_there(page):
    """`trainer/loop.py` on a page is a file of the package or of the repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|yaml|md|txt))`", text):
        roots = (REPOSITORY, REPOSITORY / "src" / "paceline", page.parent)
        assert any((root / name).exists() for root in roots), f"{page.name} names {name}"


def test_llms_txt_is_current():
    made = _module(DOCS / "llms.py")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "llms.txt is old; run  python docs/llms.py"


def test_reference_is_complete():
    fill_page = _module(DOCS / "reference.py").fill_page
    text = "".join(fill_page((DOCS / name).read_text(encoding="utf-8")) for name in ("keys.md", "cli.md"))
    assert "<!-- fill" not in text
    for key in (key for sections in _sections() for key, *_ in RunSpec(**sections).fields()):
        assert f"| `{key}` |" in text, f"docs/keys.md has no section for {key}"
    assert all(f"## {verb}\n" in text for verb in list_verbs())


def _sections():
    """The sections of each workload that comes with the package."""
    from paceline.config.registry import BUILT_IN, find_entry

    return [
        {name: kind.model_construct() for name, kind in find_entry(workload).sections().items()}
        for workload in BUILT_IN
    ]


def _module(file: Path):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_own_model_example_trains(tmp_path):
    run_file = DOCS / "examples" / "own_model.yaml"
    spec = paceline.load(run_file, ["train.steps=60", "train.evaluate_every=60", "parallel.threads=1"])
    result = paceline.train(spec, tmp_path, show=False)
    assert result.status == "finished"
    assert result.metrics["loss"] < 0.06 < result.summary.loss_first


@pytest.mark.parametrize(
    ("name", "marks", "count"), [("own_model", "class (OwnModel|Points|Network)", 3), ("own_training", "^def ", 5)]
)
def test_a_page_shows_its_example_as_it_is(name, marks, count):
    """But for annotations and docstrings: every line of code on the page is a line of the example."""
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    example = (DOCS / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert (DOCS / "examples" / f"{name}.yaml").read_text(encoding="utf-8").split("\n", 1)[1] in page
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = "\n".join(block for block in blocks if re.search(marks, block, re.MULTILINE))
    assert len(re.findall(marks, shown, re.MULTILINE)) == count
    for line in map(str.strip, shown.splitlines()):
        assert line.split("(")[0].rstrip(":") in example, line
        assert line.startswith(("def ", "class ")) or line in example, line


@pytest.mark.parametrize("page", PAGES, **ID)
def test_keys_of_the_run_file_on_pages_are_known(page):
    known = {key for sections in _sections() for key, *_ in RunSpec(**sections).fields()}
    known |= {f"data.{name}" for name in DataSection.model_fields}  # of a user's own workload
    known |= {f"data.{name}" for name in ScriptArguments.model_fields}
    spans = re.findall(r"`((?:model|data|train|parallel)\.\w+)(?:=[^`]*)?`", page.read_text(encoding="utf-8"))
    files = (".csv", ".md", ".py", ".yaml", ".safetensors", ".onnx")
    unknown = [key for key in spans if key not in known and not key.endswith(files)]
    assert not unknown, f"{page.name} names {unknown}"


def test_the_model_of_the_readme_trains(tmp_path):
    """Cut out of the page as a reader would, and run."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for name, language in (("line.py", "python"), ("line.yaml", "yaml")):
        (tmp_path / name).write_text(re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1])
    spec = paceline.load(tmp_path / "line.yaml", ["parallel.threads=1"])
    result = paceline.train(spec, tmp_path / "runs", show=False)
    assert result.summary.loss_last < 1e-3 < result.summary.loss_first


@pytest.mark.parametrize("page", PAGES, **ID)
def test_run_files_on_pages_are_valid(page, tmp_path):
    """Every YAML block that is a run file, or a section of one, for the classifier."""
    import yaml

    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)):
        if "workload" in (values := yaml.safe_load(block)) and ":" in values["workload"]:
            continue
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        paceline.load(file)


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Each cell, with what a notebook shows of its last line."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    space, shown = {}, []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        *before, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module([*before], []), "cell", "exec"), space)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), space))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), space)
    plan, speedups, result, metrics, predictions, two, sides, late = shown
    assert two.summary.ranks == 2
    assert sides.labels == ["0", "1"]
    assert list(late.columns) == ["predicted", "probability", "p(False)", "p(True)"]
    assert repr(plan).startswith("<Plan: notebook: ")
    assert speedups[0] == (1, 1.0)
    assert repr(result).startswith("<RunResult: notebook finished after ")
    assert f"<td>{result.summary.trained.samples}</td>" in result._repr_html_()
    assert "accuracy" in metrics
    assert len(predictions) == 1
    assert not list(tmp_path.iterdir())


def test_the_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    """The class of its cell trains on 2 ranks, and its progress is one line."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with which a kernel does not take what ranks print
    notebook = nbformat.read(DOCS / "notebook.ipynb", 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("global_batch=50, show=False", "global_batch=50")
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    texts = ["".join(out.get("text", "") for out in cell.get("outputs", ())) for cell in notebook.cells]
    assert sum("by value" in text for text in texts) == 1
    assert sum(" samples/s  loss " in text for text in texts) == 1


def test_the_tests_that_the_page_names_are_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "security.md").read_text(encoding="utf-8")))
    assert len(named) >= 15
    assert not [name for file, name in sorted(named) if f"def {name}(" not in (REPOSITORY / file).read_text()]
