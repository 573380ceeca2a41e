"""Export trees to ONNX: one TreeEnsemble operator, and the link function after it."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.prepared_table import Task
from paceline.errors import UserError
from paceline.inference.export import compare_onnx
from paceline.io.files import write_atomic

if TYPE_CHECKING:
    from paceline.workloads.trees.tree_model import FittedTrees

LEQ, LESS, MEMBER = 0, 1, 6  # comparisons of the operator, by its numbers
TARGETS = ("nodes_truenodeids", "nodes_trueleafs", "nodes_falsenodeids", "nodes_falseleafs")
OPSETS = {"": 18, "ai.onnx.ml": 5}
TOLERANCE = 1e-4
TEST_ROWS = 256
MARGINS = {Task.BINARY: lambda p: math.log(p / (1 - p)), Task.COUNT: math.log}
"""XGBoost's base score as a margin, where it is not one already."""


@dataclass(frozen=True)
class Branch:
    feature: int
    compares: int
    against: float
    members: Sequence[int]
    missing: bool
    yes: Any
    no: Any


@dataclass
class TreeArrays:
    """The branches and leaves of all trees, in the layout of the operator."""

    branches: list[Branch] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    """[target of a yes, 1 if that is a leaf, and the same of a no]."""
    leaves: list[tuple[float, int]] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)

    def add(self, root: Any, output: int, look: Callable[[Any], Branch | float]) -> None:
        first = look(root)
        if not isinstance(first, Branch):  # a tree that is a leaf: both ways lead to it
            first = Branch(0, LESS, 0.0, (), True, root, root)
        self.roots.append(len(self.branches))
        open_nodes = [(self._append_branch(first), first)]
        while open_nodes:
            at, branch = open_nodes.pop()
            for child in (branch.yes, branch.no):
                found = look(child)
                if isinstance(found, Branch):
                    place = self._append_branch(found)
                    open_nodes.append((place, found))
                    self.targets[at] += [place, 0]
                else:
                    self.leaves.append((found, output))
                    self.targets[at] += [len(self.leaves) - 1, 1]

    def _append_branch(self, branch: Branch) -> int:
        self.branches.append(branch)
        self.targets.append([])
        return len(self.branches) - 1

    def build_tree_ensemble_node(self, outputs: int) -> Any:
        """Return one ONNX TreeEnsemble node over all trees: leaves are summed, nothing is applied after."""
        from onnx import helper, numpy_helper

        def tensor(name: str, values: Sequence[float], kind: Any = np.float32) -> Any:
            return numpy_helper.from_array(np.array(values, kind), name)

        nodes = self.branches
        members = [value for node in nodes if node.compares == MEMBER for value in (*node.members, math.nan)]
        targets = zip(*self.targets, strict=True)
        values: dict[str, Any] = {
            "tree_roots": self.roots,
            "nodes_featureids": [node.feature for node in nodes],
            "nodes_modes": tensor("modes", [node.compares for node in nodes], np.uint8),
            "nodes_splits": tensor("splits", [node.against for node in nodes]),
            "nodes_missing_value_tracks_true": [int(node.missing) for node in nodes],
            **dict(zip(TARGETS, targets, strict=True)),
            "leaf_weights": tensor("leaves", [value for value, _ in self.leaves]),
            "leaf_targetids": [output for _, output in self.leaves],
        }
        if members:
            values["membership_values"] = tensor("members", members)
        sums = {"n_targets": outputs, "aggregate_function": 1, "post_transform": 0}
        return helper.make_node("TreeEnsemble", ["rows"], ["sums"], domain="ai.onnx.ml", **sums, **values)


def _add_xgboost_trees(raw: bytes, task: Task, arrays: TreeArrays) -> list[float]:
    learner = json.loads(raw)["learner"]
    model = learner["gradient_booster"]["model"]
    for tree, output in zip(model["trees"], model["tree_info"], strict=True):
        segments = zip(tree["categories_nodes"], tree["categories_segments"], tree["categories_sizes"], strict=True)
        to_the_right = {node: tree["categories"][first : first + size] for node, first, size in segments}
        arrays.add(0, output, partial(_xgboost_node, tree, to_the_right))
    guess = json.loads(learner["learner_model_param"]["base_score"])
    return [MARGINS.get(task, float)(value) for value in (guess if isinstance(guess, list) else [guess])]


def _xgboost_node(tree: Mapping[str, Any], sets: Mapping[int, Sequence[int]], node: int) -> Branch | float:
    left, right, against = tree["left_children"][node], tree["right_children"][node], tree["split_conditions"][node]
    if left < 0:
        return float(against)
    feature, missing_left = tree["split_indices"][node], bool(tree["default_left"][node])
    if node in sets:
        return Branch(feature, MEMBER, 0.0, sets[node], not missing_left, right, left)
    return Branch(feature, LESS, against, (), missing_left, left, right)


def _add_lightgbm_trees(raw: bytes, outputs: int, arrays: TreeArrays) -> list[float]:
    import lightgbm

    trees = lightgbm.Booster(model_str=raw.decode()).dump_model()["tree_info"]
    for number, tree in enumerate(trees):
        arrays.add(tree["tree_structure"], number % outputs, _lightgbm_node)
    return [0.0] * outputs


def _lightgbm_node(node: Mapping[str, Any]) -> Branch | float:
    if "split_feature" not in node:
        return float(node["leaf_value"])
    children = (node["left_child"], node["right_child"])
    if node["decision_type"] == "==":
        members = [int(name) for name in str(node["threshold"]).split("||")]
        return Branch(node["split_feature"], MEMBER, 0.0, members, False, *children)
    against = np.float32(node["threshold"])
    if float(against) > node["threshold"]:  # rows are of 32 bits: the next such number below asks the same of them
        against = np.nextafter(against, np.float32(-np.inf))
    missing = node["default_left"] if node["missing_type"] == "NaN" else node["threshold"] >= 0
    return Branch(node["split_feature"], LEQ, float(against), (), bool(missing), *children)


def _build_link(task: Task) -> Iterator[Any]:
    from onnx import helper

    match task:
        case Task.BINARY:
            yield helper.make_node("Sigmoid", ["margins"], ["second"])
            yield helper.make_node("Sub", ["one", "second"], ["first"])
            yield helper.make_node("Concat", ["first", "second"], ["probabilities"], axis=1)
        case Task.CLASSES:
            yield helper.make_node("Softmax", ["margins"], ["probabilities"], axis=1)
        case Task.COUNT:
            yield helper.make_node("Exp", ["margins"], ["counts"])
            yield helper.make_node("Reshape", ["counts", "flat"], ["predicted"])
        case _:
            yield helper.make_node("Reshape", ["margins", "flat"], ["predicted"])


def write_trees_onnx(fitted: "FittedTrees", file: Path) -> None:
    """Write trees with one input `rows`, encoded as in names.json; compare them where onnxruntime is installed."""
    if find_spec("onnx") is None:
        raise UserError("ONNX export needs onnx; type  pip install 'paceline[onnx]'", code="not-installed", key="onnx")
    from onnx import TensorProto, checker, helper, numpy_helper

    target, arrays, columns = fitted.target, TreeArrays(), len(fitted.coding.columns)
    task, classes = target.task, len(target.classes)
    if fitted.library == "xgboost":
        base = _add_xgboost_trees(fitted.raw, task, arrays)
    else:
        base = _add_lightgbm_trees(fitted.raw, target.outputs, arrays)
    constants = {"base": np.array(base, np.float32), "one": np.float32(1), "flat": np.array([-1])}
    add = helper.make_node("Add", ["sums", "base"], ["margins"])
    nodes = [arrays.build_tree_ensemble_node(target.outputs), add, *_build_link(task)]
    used = {name for node in nodes for name in node.input}
    output = ("probabilities", ["samples", classes]) if classes else ("predicted", ["samples"])
    graph = helper.make_graph(
        nodes,
        "trees",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["samples", columns])],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in used],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="paceline")
    checker.check_model(model)
    content = model.SerializeToString()
    rows = _make_test_rows(arrays, fitted)
    compare_onnx(content, {"rows": rows}, fitted.predict_encoded(rows), TOLERANCE)
    write_atomic(file, content)


def _make_test_rows(arrays: TreeArrays, fitted: "FittedTrees") -> np.ndarray:
    """Return rows that take all branches: values are thresholds, slightly smaller ones, or missing."""
    random, coding = np.random.default_rng(0), fitted.coding
    rows = np.empty((TEST_ROWS, len(coding.columns)), np.float32)
    for number, name in enumerate(coding.columns):
        if name in coding.categories:
            values = np.arange(len(coding.categories[name]), dtype=np.float32)
        else:
            exact = np.array([0.0, *(b.against for b in arrays.branches if b.feature == number)], np.float32)
            values = np.concatenate([exact, np.nextafter(exact, np.float32(-np.inf))])
        rows[:, number] = random.choice(np.append(values, np.float32(np.nan)), TEST_ROWS)
    return rows
