"""Models in the libraries' own texts, looked at before a library does.

The libraries follow whatever a model says: a child that is its own parent is an endless loop, a column beyond the last
is memory of somebody else, and what LightGBM cannot read ends the process. All that they take as a place or a length is
checked here; values are for them to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

MOST_CATEGORIES = 1 << 24
LARGEST = np.iinfo(np.int32).max
INFO = re.compile(r"none|\[-?[\d.e+-]+:-?[\d.e+-]+\]|-?\d+(:-?\d+)*", re.ASCII)
"""What LightGBM says of a column: from where to where its values are, or which."""
NAME = re.compile(r'[^"\\,:\[\]{}\x00-\x1f]+')
REAL = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-?nan|-?inf", re.ASCII)
OF_NODES = ("left_children", "right_children", "parents", "split_indices", "split_type")
NUMBERS_OF_NODES = ("base_weights", "loss_changes", "split_conditions", "sum_hessian")


def check_model(library: str, raw: bytes, columns: int, outputs: int) -> None:
    """ValueError where it is not a model of so many columns that gives so many numbers for a row."""
    try:
        (_check_xgboost if library == "xgboost" else _check_lightgbm)(raw, columns, outputs)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _check_xgboost(raw: bytes, columns: int, outputs: int) -> None:
    whole = json.loads(raw)
    learner = whole["learner"]
    booster, facts = learner["gradient_booster"], learner["learner_model_param"]
    model = booster["model"]
    trees, groups, rounds = model["trees"], _whole(model["tree_info"]), _whole(model["iteration_indptr"])
    _check(booster["name"] == "gbtree" and _number(facts["num_feature"]) == columns, "its columns are others")
    _check(max(1, _number(facts["num_class"])) == outputs, "its classes are others")
    base = json.loads(facts["base_score"])
    _check(not isinstance(base, list) or len(base) in (1, outputs), "its classes are others")
    _check(_number(facts.get("num_target", "1")) == 1, "it has several targets")
    _check(_number(model["gbtree_model_param"]["num_trees"]) == len(trees) == len(groups), "trees are missing")
    _check(_number(model["gbtree_model_param"]["num_parallel_tree"]) >= 1, "its rounds have no trees")
    _check(rounds[0] == 0 and rounds[-1] == len(trees) and bool((np.diff(rounds) >= 0).all()), "its rounds are others")
    _check(bool(((groups >= 0) & (groups < outputs)).all()), "its trees are of other classes")
    _check(not any(model.get("cats", {}).values()), "it has categories of its own")
    for number, tree in enumerate(trees):
        _check_tree(f"tree {number}", tree, columns)


def _check_tree(name: str, tree: Mapping[str, Any], columns: int) -> None:
    left, right, parents, split, kind = (_whole(tree[key]) for key in OF_NODES)
    facts, nodes = tree["tree_param"], len(left)
    arrays = [right, parents, split, kind, tree["default_left"], *(_numbers(tree[key]) for key in NUMBERS_OF_NODES)]
    _check(all(len(array) == nodes == _number(facts["num_nodes"]) for array in arrays), f"{name} is not whole")
    _check(_number(facts["num_feature"]) == columns, f"{name} is of other columns")
    _check(_number(facts["size_leaf_vector"]) <= 1 and _number(facts["num_deleted"]) < nodes, f"{name} is another kind")
    _check(all(value in (0, 1) for value in tree["default_left"]), f"{name} has other values than 0 and 1")
    _check_places(name, split, columns)
    _check_places(name, kind, 2)
    _check_places(name, parents, LARGEST + 1)
    _check_branches(name, left, right, -1)
    sets, starts, sizes = (_whole(tree[f"categories_{key}"]) for key in ("nodes", "segments", "sizes"))
    _check(len(sets) == len(starts) == len(sizes), f"{name} has other categories")
    _check_places(name, sets, nodes)
    _check(bool((np.diff(sets) > 0).all()) and set(np.flatnonzero(kind)) == set(sets.tolist()), f"{name} mixes them up")
    _check(
        bool(((starts >= 0) & (sizes > 0) & (starts + sizes <= len(tree["categories"]))).all()), f"{name} lacks some"
    )
    _check_places(name, _whole(tree["categories"]), MOST_CATEGORIES)


def _check_branches(name: str, left: np.ndarray, right: np.ndarray, leaf: int) -> None:
    """Two branches or none at every node, and one way to each of them; `leaf` and below is no node."""
    seen = np.zeros(len(left), bool)
    front = np.zeros(min(1, len(left)), np.int64)
    while len(front):
        _check(not seen[front].any() and len(np.unique(front)) == len(front), f"{name} comes to a node twice")
        seen[front] = True
        both = np.concatenate([left[front], right[front]])
        if leaf == -1:
            _check(bool(((left[front] == -1) == (right[front] == -1)).all()), f"{name} has half of a branch")
        front = both[both >= 0]
        _check_places(name, front, len(left))


def _check_lightgbm(raw: bytes, columns: int, outputs: int) -> None:
    head = raw.partition(b"\n\n")[0]
    begins, *lines = head.decode().split("\n")
    facts = _named([line for line in lines if "=" in line])
    names, infos = (facts[key].split(" ") for key in ("feature_names", "feature_infos"))
    _check(begins == "tree" and b"\0" not in head and _number(facts["label_index"]) >= 0, "it is no model of LightGBM")
    _check(len(names) == len(infos) == columns == _number(facts["max_feature_idx"]) + 1, "its columns are others")
    _check(all(map(NAME.fullmatch, names)) and all(map(INFO.fullmatch, infos)), "its columns are no columns")
    _check(_number(facts["num_class"]) == _number(facts["num_tree_per_iteration"]) == outputs, "its classes are others")
    sizes = [_number(size) for size in facts["tree_sizes"].split(" ")]
    at = len(head) + 2
    for number, size in enumerate(sizes):
        tree = re.fullmatch(rf"Tree={number}\n((?:[a-z_]+=[^\n]*\n)+)\n\n", raw[at : at + size].decode())
        if tree is None:
            raise ValueError(f"tree {number} is not where it should be")
        _check_leaves(f"tree {number}", _named(tree[1].split("\n")[:-1]), columns)
        at += size
    _check(raw[at:].startswith(b"end of trees\n") and len(sizes) % outputs == 0, "trees are missing")


def _named(lines: Sequence[str]) -> dict[str, str]:
    """`name=words` of each line."""
    found = dict(line.split("=", 1) for line in lines)
    _check(len(found) == len(lines), "it says something twice")
    return found


def strip_lightgbm_model(raw: bytes) -> str:
    """A model of LightGBM without its objective and its parameters: it would parse them, and margins take neither."""
    trees = raw.partition(b"\nend of trees\n")[0].decode()
    trees = re.sub(r"\nobjective=[^\n]*", "", trees, count=1)
    return (
        f"{trees}\nend of trees\n\nfeature_importances:\n\nparameters:\nend of parameters\n\npandas_categorical:null\n"
    )


def _check_leaves(name: str, tree: Mapping[str, str], columns: int) -> None:
    leaves, cats = _number(tree["num_leaves"]), _number(tree["num_cat"])
    _check(leaves >= 1 and tree.get("is_linear", "0") == "0", f"{name} is another kind")
    found = {key: [_real(word) for word in words.split(" ") if word] for key, words in tree.items()}
    of_leaves = ("leaf_value", "leaf_weight", "leaf_count")[: 3 if leaves > 1 else 1]
    _check(all(len(found[key]) == leaves for key in of_leaves), f"{name} has other leaves")
    if leaves == 1:
        return
    nodes = leaves - 1
    keys = ("split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child")
    inner = [found[key] for key in (*keys, "internal_value", "internal_weight", "internal_count")]
    _check(all(len(values) == nodes for values in inner), f"{name} has other branches")
    split, kind, left, right = (_places(found[key]) for key in (keys[0], *keys[3:]))
    _check_places(name, split, columns)
    _check_places(name, kind, 128)
    ends = np.concatenate([left, right])
    ends = ~ends[ends < 0]
    _check_places(name, ends, leaves)
    _check(len(np.unique(ends)) == len(ends) == leaves, f"{name} comes to a leaf twice")
    _check_branches(name, left, right, -leaves - 1)
    _check_sets(name, cats, found, np.array(found["threshold"])[kind % 2 == 1])


def _check_sets(name: str, cats: int, found: Mapping[str, Sequence[float]], places: np.ndarray) -> None:
    """Which categories go left: numbers of sets where a threshold would be, and where each of them begins."""
    bounds, words = (_places(found.get(key, ())) for key in ("cat_boundaries", "cat_threshold"))
    if not cats:
        _check(not len(places), f"{name} has no categories")
        return
    _check(len(bounds) == cats + 1 and bounds[0] == 0 and bounds[-1] == len(words), f"{name} has other categories")
    _check(all(one < other for one, other in pairwise(bounds)), f"{name} has other categories")
    _check_places(name, _places(places), cats)
    _check_places(name, words, 1 << 32)


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _check_places(name: str, places: np.ndarray, most: int) -> None:
    if len(places) and not (places.min() >= 0 and places.max() < most):
        raise ValueError(f"{name} points to what is not there")


def _number(text: Any) -> int:
    """As the libraries write whole numbers that are not negative."""
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError(f"{text!r:.40} is no number")
    return int(text)


def _real(word: str) -> float:
    """Python reads more than LightGBM does."""
    if not REAL.fullmatch(word):
        raise ValueError(f"{word!r:.40} is no number")
    return float(word)


def _places(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Whole numbers, which were read as others."""
    return _whole([int(value) if float(value).is_integer() else value for value in values])


def _whole(values: Any) -> np.ndarray:
    found = np.asarray(values)
    if not isinstance(values, list) or found.ndim != 1 or (values and found.dtype.kind != "i"):
        raise ValueError(f"{values!r:.40} are not whole numbers")
    return found.astype(np.int64)


def _numbers(values: Any) -> np.ndarray:
    found = np.asarray(values)
    if not isinstance(values, list) or found.ndim != 1 or (values and found.dtype.kind not in "if"):
        raise ValueError(f"{values!r:.40} are not numbers")
    return found
