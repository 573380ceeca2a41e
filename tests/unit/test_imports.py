"""The layers: packages import each other in one direction, and nobody imports a workload."""

import ast
import importlib.util
from graphlib import CycleError
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PUBLIC = dict.fromkeys(("paceline.topics", "paceline.tinytopics"), "paceline.workloads.topics")
"""Modules and packages through which users import a workload."""


@pytest.fixture(scope="module")
def layers():
    spec = importlib.util.spec_from_file_location("layers", REPOSITORY / "docs" / "layers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def strangers(found):
    """Imports of a workload from outside of its folder."""
    for module, name in found:
        home = ".".join(name.split(".")[:3])
        known = module.startswith(home) or PUBLIC.get(".".join(module.split(".")[:2])) == home
        if name.startswith("paceline.workloads.") and not known:
            yield f"{module} imports {name}"


def test_imports_go_downwards(layers):
    assert "errors" in layers.levels(layers.graph_of(layers.imports()))[0]


def test_nothing_outside_of_a_workload_imports_it(layers):
    assert not list(strangers(layers.imports()))


def test_planted_imports_are_found(layers, tmp_path):
    for name in ("planner", "launch"):
        (tmp_path / name).mkdir()
    (tmp_path / "planner" / "plan.py").write_text("def f():\n    from paceline.launch import local\n")
    (tmp_path / "launch" / "local.py").write_text("from paceline.planner.plan import f\n")
    (tmp_path / "launch" / "nodes.py").write_text("import paceline.workloads.lm.decoder\n")
    with pytest.raises(CycleError):
        layers.levels(layers.graph_of(layers.imports(tmp_path)))
    assert list(strangers(layers.imports(tmp_path))) == ["paceline.launch.nodes imports paceline.workloads.lm.decoder"]


def test_picture_of_the_layers_is_current(layers):
    assert layers.picture() == layers.PICTURE.read_text(encoding="utf-8"), "it is old; run  python docs/layers.py"


def test_each_package_names_what_it_imports(layers):
    graph = layers.graph_of(layers.imports())
    for folder in sorted(path.parent for path in layers.PACKAGE.glob("*/__init__.py")):
        about = " ".join((ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").split())
        if folder.name not in ("horovod", "tinytopics"):  # interfaces of other libraries
            wanted = f"Imports {', '.join(sorted(graph.get(folder.name, ())))}."
            assert about.endswith(wanted), f"{folder.name}/__init__.py must end with: {wanted}"


def names_of(module):
    """What a module or its stub binds, and the modules of a package; nothing if there is no such file."""
    base = REPOSITORY / "src" / Path(*module.split("."))
    file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    if file is None:
        return set()
    stub = file.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else file).read_text(encoding="utf-8"))
    found = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_programs_that_no_test_runs_import_what_exists():
    files = [*REPOSITORY.glob("benchmarks/*.py"), *REPOSITORY.glob("tests/*/*.py"), *REPOSITORY.glob("docs/**/*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("paceline.")]
    missing = [f"{node.module}.{a.name}" for node in imports for a in node.names if a.name not in names_of(node.module)]
    assert not [name for name in missing if "*" not in names_of(name.rpartition(".")[0])]
