"""Tokens: exact batches, a cache that is used, shared, repaired, and never half there."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest

from paceline.data import cache
from paceline.data.corpora.labelled import LabelledCorpus, Tokens, open_source
from paceline.errors import RunFailed, UserError
from paceline.workloads.classifier.sections import TextData
from results import expect_error

SUBJECTS = ["rider", "wheel", "road", "hill", "wind", "bottle", "chain", "saddle", "map", "rain"]


def write_rows(folder, n=400):
    rng = np.random.default_rng(0)
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(n):
            words = " ".join(rng.choice(SUBJECTS, size=1 + i % 30))
            text = {0: "", 1: "A [MASK] in Capitals"}.get(i, f"{words} {i}")
            file.write(json.dumps({"text": text, "label": i % 3}) + "\n")
    return path


@pytest.fixture
def data(tmp_path):
    return TextData(source="jsonl", path=write_rows(tmp_path), vocab=400, max_length=24, cache=tmp_path / "cache")


def entries(data):
    return sorted(path.name for path in data.cache.iterdir() if not path.name.endswith((".lock", ".digest")))


def naive(split, samples):
    return [int(t) for i in samples for t in split.ids[split.offsets[i] : split.offsets[i + 1]]]


def test_the_stored_tokens_are_the_tokens_of_the_texts(data):
    corpus = LabelledCorpus.prepare(data)
    assert corpus.classes == ("0", "1", "2")
    assert corpus.vocab == corpus.tokenizer.get_vocab_size() <= 400
    source = open_source(data)
    for split, stream in ((corpus.train, source.train()), (corpus.test, source.test())):
        rows = list(stream)
        assert len(split) == len(rows)
        assert split.labels.tolist() == [label for _, label in rows]
        for i, (text, _) in enumerate(rows):
            ids = split.gather(np.array([i])).tolist()
            assert ids == (corpus.tokenizer.encode(text).ids or [0])
            assert 1 <= len(ids) <= 24
            if len(ids) < 24 and text:
                assert corpus.tokenizer.decode(ids) == text, "byte-level: nothing is lost"
                assert 0 not in ids, "not even by a text that spells [MASK]"
    lower = LabelledCorpus.prepare(data.model_copy(update={"lowercase": True})).tokenizer
    assert lower.decode(lower.encode("A [MASK] in Capitals").ids) == "a [mask] in capitals"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_gather_is_the_naive_loop(dtype):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 50, 300)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    split = Tokens(rng.integers(0, 60_000, offsets[-1]).astype(dtype), offsets, np.zeros(300, np.int64))
    for size in (0, 1, 2, 128, 1000):
        samples = rng.integers(0, 300, size)
        packed = split.gather(samples)
        assert packed.dtype == np.int64
        assert packed.tolist() == naive(split, samples)
        assert split.lengths(samples).tolist() == lengths[samples].tolist()


def test_the_second_time_comes_from_the_cache(data):
    said = []
    first = LabelledCorpus.prepare(data, said.append)
    assert any("training and" in line for line in said)
    again = LabelledCorpus.prepare(data, said.append)
    assert sum("learning a vocabulary" in line for line in said) == 1
    assert (again.folder, again.fingerprint) == (first.folder, first.fingerprint)
    assert entries(data) == [first.folder.name]
    assert first.folder.name.startswith("jsonl-")
    assert pickle.loads(pickle.dumps(again)).train.gather(np.arange(5)).tolist() == naive(first.train, range(5))


def test_another_setting_is_another_entry(data):
    changes = [{"vocab": 300}, {"max_length": 8}, {"lowercase": True}, {"limit": 50}, {"test_fraction": 0.3}, {}]
    assert len({LabelledCorpus.prepare(data.model_copy(update=change)).folder for change in changes}) == 6


def edit(file, old, new):
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new))


DAMAGES = {
    "truncated": lambda corpus: os.truncate(corpus.folder / "train.ids.npy", 200),
    "missing file": lambda corpus: (corpus.folder / "test.offsets.npy").unlink(),
    "half a meta": lambda corpus: os.truncate(corpus.folder / "meta.json", 40),
    "wrong count": lambda corpus: edit(corpus.folder / "meta.json", b'"samples": 3', b'"samples": 2'),
    "swapped": lambda corpus: shutil.copy(corpus.folder / "test.labels.npy", corpus.folder / "train.labels.npy"),
    "edited": lambda corpus: edit(corpus.folder / "tokenizer.json", b"rider", b"rides"),
    "a file instead": lambda corpus: (shutil.rmtree(corpus.folder), corpus.folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_built_again(data, damage):
    first = LabelledCorpus.prepare(data)
    expected = naive(first.train, range(20))
    damage(first)
    said = []
    again = LabelledCorpus.prepare(data, said.append)
    assert "damaged" in said[0]
    assert again.fingerprint == first.fingerprint
    assert naive(again.train, range(20)) == expected
    assert entries(data) == [first.folder.name]


def test_what_a_killed_builder_left_is_removed(data):
    first = LabelledCorpus.prepare(data)
    leftover = first.folder.rename(f"{first.folder}.part-x1")
    LabelledCorpus.prepare(data)
    assert not leftover.exists()
    assert entries(data) == [first.folder.name]


DISKS = [(errno.ENOSPC, "disk-full", RunFailed), (errno.EROFS, "not-writable", UserError)]


@pytest.mark.parametrize(("number", "code", "kind"), DISKS)
def test_a_failing_disk_leaves_nothing_behind(data, monkeypatch, number, code, kind):
    def fail(self, values):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache.ArrayWriter, "append", fail)
    with expect_error(code, "data.cache", kind):
        LabelledCorpus.prepare(data)
    assert entries(data) == []


BUILDER = """
import errno, fcntl, sys, time
from pathlib import Path
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.workloads.classifier.sections import TextData

def no_locks(*a): raise OSError(errno.ENOLCK, "no locks")
if sys.argv[3] == "unlocked": fcntl.flock = no_locks
folder = Path(sys.argv[1])
Path(folder, sys.argv[2]).touch()
while len(list(folder.glob("ready-*"))) < 2: time.sleep(0.001)
said = []
data = TextData(source="jsonl", path=folder / "rows.jsonl", vocab=2000, cache=folder / "cache")
corpus = LabelledCorpus.prepare(data, said.append)
print(sum("learning" in line for line in said), corpus.fingerprint, int(corpus.train.ids.sum()))
"""


@pytest.mark.parametrize("locks", ["locked", "unlocked"])
def test_two_processes_at_once_end_with_the_same_corpus(tmp_path, locks):
    write_rows(tmp_path, 8000)
    env, pipe = {**os.environ, "PYTHONPATH": ":".join(sys.path)}, subprocess.PIPE
    commands = ([sys.executable, "-c", BUILDER, str(tmp_path), f"ready-{i}", locks] for i in range(2))
    builders = [subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True) for words in commands]
    ends = [builder.communicate(timeout=300) for builder in builders]
    assert [error for _, error in ends] == ["", ""]
    built, fingerprints, sums = zip(*(out.split() for out, _ in ends), strict=True)
    assert len(set(fingerprints)) == len(set(sums)) == 1
    if locks == "locked":
        assert sorted(built) == ["0", "1"], "one builds it, for both"
    assert [p.name for p in (tmp_path / "cache").iterdir() if ".part-" in p.name] == []


def test_a_fork_after_tokenising_is_silent(data):
    code = (
        "import os, sys; from paceline.workloads.classifier.sections import TextData;"
        "from paceline.data.corpora.labelled import LabelledCorpus;"
        "corpus = LabelledCorpus.prepare(TextData.model_validate_json(sys.argv[1])); pid = os.fork();"
        "n = len(corpus.tokenizer.encode_batch(['the rider', 'the hill'] * 50));"
        "os._exit(0) if pid == 0 else print(os.waitpid(pid, 0)[1], n)"
    )
    env = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    env["PYTHONPATH"] = ":".join(sys.path)
    words = [sys.executable, "-c", code, data.model_dump_json()]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.stderr) == ("0 100", "")
