"""The run file: what is read, where each value came from, and what an override changes."""

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import COMMAND_LINE, DEFAULT, Train, build_spec, load
from paceline.errors import UserError
from paceline.planner.cost_model import build_cost_model
from results import expect_error

TEXT = """\
# a comment
name: news
model:
  width: 64
  heads: 8
data: {source: csv, path: rows.csv, cache: ~/somewhere}
train:
  epochs: 3
  lr: 3e-4
parallel: auto
"""


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "news.yaml"
    file.write_text(TEXT)
    return file


VALUES = {
    "name": ("news", "news.yaml line 2"),
    "model.heads": (8, "news.yaml line 5"),
    "model.layers": (2, DEFAULT),
    "train.epochs": (3, "news.yaml line 8"),
    "train.lr": (1e-2, COMMAND_LINE),
    "parallel.ranks": (2, COMMAND_LINE),
}


def test_every_value_knows_its_line(file):
    spec = load(file, ["train.lr=1", "train.lr=1e-2", "parallel.ranks=2"])
    found = {key: (value, spec.origin(key)) for key, value, *_ in spec.fields()}
    assert {key: found[key] for key in VALUES} == VALUES


def test_an_empty_section_is_all_defaults(tmp_path):
    assert load_text(tmp_path, "train:\nmodel:\n").train == Train()


def test_a_merged_section_knows_the_lines_of_both(tmp_path):
    (tmp_path / "run.yaml").write_text("train: &usual\n  lr: 1\n  seed: 3\nmodel: {}\n")
    assert load(tmp_path / "run.yaml").train.seed == 3
    (tmp_path / "run.yaml").write_text("train: {<<: {lr: 0.5, seed: 3},\n  lr: 0.25}\n")
    spec = load(tmp_path / "run.yaml")
    assert (spec.train.lr, spec.train.seed) == (0.25, 3)
    assert spec.origin("train.seed") == "run.yaml line 1"
    assert spec.origin("train.lr") == "run.yaml line 2"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=3e-4", "lr", 3e-4),
        ("train.lr=1", "lr", 1.0),
        ("train.steps=7", "steps", 7),
        ("train.loggers=[tensorboard, mlflow]", "loggers", ("tensorboard", "mlflow")),
        ("train.loggers=[]", "loggers", ()),
        ("train.compile=off", "compile", "off"),
        ("train.epochs=null", "epochs", None),
    ],
)
def test_overrides_are_read_as_yaml(file, override, key, value):
    assert getattr(load(file, [override]).train, key) == value
    assert getattr(load(file, {f"train.{key}": value}).train, key) == value


def test_a_new_length_replaces_the_old(file):
    spec = load(file, ["train.steps=9"])
    assert (spec.train.epochs, spec.train.steps) == (None, 9)
    assert spec.origin("train.epochs") == DEFAULT
    assert load(file, ["train.epochs=9"]).origin("train.epochs") == COMMAND_LINE
    with pytest.raises(UserError, match=r"train.epochs=1 and"):
        load(file, ["train.epochs=1", "train.steps=2"])


def test_paths_mean_the_same_from_anywhere(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    spec = load(Path("..") / "news.yaml", ["data.test_path=test.csv"])
    assert spec.data.path == tmp_path / "rows.csv", "in the file, relative to the file"
    assert spec.data.test_path == elsewhere / "test.csv", "on the command line, relative to the current folder"
    assert spec.data.cache == tmp_path / "home" / "somewhere"


def test_own_workloads_are_found_beside_the_run_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from paceline import Workload\nfrom paceline.config import Section, field\n"
        "class Model(Section):\n    depth: int = field(3, 'layers', 'how deep')\n"
        "class Mine(Workload):\n    Model = Model\n"
    )
    (tmp_path / "run.yaml").write_text("workload: mine:Mine\nmodel: {depth: 5}\n")
    monkeypatch.chdir("/")
    spec = load(tmp_path / "run.yaml")
    assert spec.workload == f"{tmp_path / 'mine.py'}:Mine"
    assert spec.model.depth == 5
    assert build_spec(spec.dump()).dump() == spec.dump()
    assert ("model.depth", 5, "layers", "how deep") in list(spec.fields())


@settings(deadline=None, max_examples=50)
@given(
    st.fixed_dictionaries(
        {
            "lr": st.floats(1e-9, 1e3),
            "global_batch": st.integers(1, 1 << 20),
            "seed": st.integers(0, (1 << 31) - 1),
            "optimizer": st.sampled_from(["adamw", "adam", "sgd", "lars", "lamb"]),
            "steps": st.none() | st.integers(1, 1 << 40),
        }
    ),
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"),
)
def test_any_spec_survives_a_file(tmp_path_factory, train, name):
    spec = build_spec({"name": name, "train": train, "data": {"cache": "/tmp/cache"}})
    file = tmp_path_factory.mktemp("spec") / "run.yaml"
    file.write_text(yaml.safe_dump(spec.dump()))
    assert load(file).dump() == spec.dump()


def test_a_spec_cannot_be_changed_but_replaced(file):
    spec = load(file)
    with pytest.raises(ValueError, match="frozen"):
        spec.train.lr = 1.0
    other = spec.replace({"train.lr": 0.1, "parallel.ranks": 3})
    assert (other.train.lr, other.parallel.ranks, spec.train.lr) == (0.1, 3, 3e-4)
    assert other.origin("train.lr") == "changed in Python"
    assert other.origin("name") == "news.yaml line 2"
    with pytest.raises(UserError, match=r"parallel.ranks: 0 is out"):
        spec.replace({"parallel.ranks": 0})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.optimiser", "train.optimizer"),
        ("paralel.ranks", "parallel"),
        ("ranks", "parallel.ranks"),
        ("model.lr", "train.lr"),
        ("batch_size", "train.global_batch"),
        ("train.learning_rate", "train.lr"),
        ("train.workload", "workload"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(file, key, meant):
    with expect_error("unknown-key", match=f"did you mean '{meant}'?"):
        load(file, [f"{key}=1"])


def test_every_problem_is_named_with_its_place(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {width: many}\ntrain:\n  lr: fast\n  epoch: 3\n")
    with pytest.raises(UserError) as refused:
        load(tmp_path / "run.yaml", ["parallel.ranks=0"])
    assert str(refused.value).splitlines() == [
        "model.width: 'many' is not a whole number (run.yaml line 1)",
        "train.lr: 'fast' is not a number (run.yaml line 3)",
        "train.epoch: unknown key, did you mean 'train.epochs'? (run.yaml line 4)",
        "parallel.ranks: 0 is out of range; it must be greater than 0 (command line)",
    ]


def test_every_field_has_a_meaning_and_the_file_stays_small():
    fields = list(build_spec({}).fields())
    assert all(meaning for _, _, _, meaning in fields)
    assert len(fields) <= 91


def test_a_section_given_anew_takes_nothing_from_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("workload: lm\nparallel: {strategy: fsdp, ranks: 4, micro_batch: 2}\n")
    changed = load(file).replace({"parallel": "auto"})
    for spec, origin in ((load(file, ["parallel=auto"]), COMMAND_LINE), (changed, "changed in Python")):
        assert spec.parallel == load_text(tmp_path, "workload: lm\nparallel: auto\n").parallel
        where = {key: spec.origin(key) for key, *_ in spec.fields() if key.startswith("parallel.")}
        assert where.pop("parallel.strategy") == origin
        assert set(where.values()) == {DEFAULT}


def load_text(folder, text):
    file = folder / "other.yaml"
    file.write_text(text)
    return load(file)


ALIASES = "k0: &k0 x\n" + "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ALIASES, "unreadable"),
        ("train: {lr: !!python/object/apply:os.system [ls]}", "invalid-format"),
        ("workload: lm\nmodel: {width: 2147483648, heads: 2147483647}", "conflict"),
        ("model: {width: 2147483647, heads: 4}", "conflict"),
        (f"workload: lm\nmodel: {{width: {10**18}, heads: 7}}", "conflict"),
    ],
)
def test_small_files_that_ask_for_much_are_answered_at_once(text, code, tmp_path):
    began = time.process_time()
    with expect_error(code):
        build_cost_model(load_text(tmp_path, text))
    assert time.process_time() - began < 2
