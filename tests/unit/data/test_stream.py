"""Texts for language models: every token is predicted once, nothing held out is trained on, and bad files say so."""

import gzip
import shlex

import numpy as np
import pytest

from paceline.cli import main
from paceline.data.corpora.documents import PIECE_CHARACTERS, find_files, open_documents
from paceline.data.corpora.stream import END_ID, prepare
from paceline.data.order import Order
from paceline.errors import UserError
from paceline.spec import LMData
from paceline.workloads.lm.workload import Windows

QUIET = lambda line: None  # noqa: E731


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(
            f"This is text {i}: " + f"word{i} größer 世界\n" * (i + 1), encoding="utf-8"
        )
    return folder


def data_of(tmp_path, path, **fields):
    return LMData(**{"source": "text", "path": path, "vocab": 300, "cache": tmp_path / "cache", **fields})


def test_tokens_decode_to_the_texts(tmp_path, texts):
    streams = prepare(data_of(tmp_path, texts), QUIET)
    documents = {False: [], True: []}
    for piece in open_documents(data_of(tmp_path, texts)).stream():
        documents[piece.held_out].append(piece.text)
    for held_out, ids in ((False, streams.train), (True, streams.test)):
        assert ids[0] == ids[-1] == END_ID
        parts = np.split(ids, np.flatnonzero(ids == END_ID))[1:-1]
        assert [streams.tokenizer.decode(part[1:].tolist()) for part in parts] == documents[held_out]
    assert len(documents[False]) + len(documents[True]) == 40
    assert 1 <= len(documents[True]) <= 12


@pytest.mark.parametrize("sequence", [1, 7, 64, 10_000])
def test_every_token_is_predicted_exactly_once(tmp_path, texts, sequence):
    for ids in (lambda c: (c.train, c.test))(prepare(data_of(tmp_path, texts), QUIET)):
        windows = Windows(ids, sequence)
        order = Order(len(windows), batch=5, seed=1)
        seen = np.zeros(len(ids), np.int64)
        for whole in order.global_batches(0, order.steps_per_epoch):
            batch = windows.batch(whole.ids, whole.keys)
            assert batch.tokens.shape == batch.targets.shape == (len(whole.ids), sequence)
            for i, tokens, targets in zip(whole.ids, batch.tokens.numpy(), batch.targets.numpy(), strict=True):
                counted = int((targets >= 0).sum())
                assert counted == windows.cost(np.array([i]))[0] > 0
                begin = i * sequence
                assert (tokens[:counted] == ids[begin : begin + counted]).all()
                assert (targets[:counted] == ids[begin + 1 : begin + counted + 1]).all()
                assert (targets[counted:] == -100).all()
                seen[begin + 1 : begin + counted + 1] += 1
        assert seen[0] == 0, "nothing is before the first end token"
        assert (seen[1:] == 1).all()


def test_padded_rows_count_nothing(tmp_path, texts):
    windows = Windows(prepare(data_of(tmp_path, texts), QUIET).train, 16)
    ids = np.array([3, 1])
    plain, padded = windows.batch(ids, ids), windows.padded(ids, ids, 5)
    assert padded.tokens.shape == (5, 16)
    assert padded.tokens[:2].equal(plain.tokens)
    assert padded.targets[:2].equal(plain.targets)
    assert (padded.targets[2:] == -100).all()


def test_a_long_file_is_cut_into_pieces_that_join_again(tmp_path):
    text = "".join(f"line {i} of a long text\n" for i in range(20_000)) + "x" * 40_000
    (tmp_path / "long.txt").write_text(text)
    pieces = list(open_documents(data_of(tmp_path, tmp_path / "long.txt")).stream())
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) <= PIECE_CHARACTERS
    held_out = sum(len(piece.text) for piece in pieces if piece.held_out) / len(text)
    assert 0.02 < held_out < 0.3
    for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
        assert piece.ends == (after is None or after.held_out != piece.held_out)


def test_the_cache_is_named_by_content(tmp_path, texts):
    lines = []
    first = prepare(data_of(tmp_path, texts), lines.append)
    again = prepare(data_of(tmp_path, texts), lines.append)
    assert again.folder == first.folder
    assert sum("learning a vocabulary" in line for line in lines) == 1
    moved = texts.rename(tmp_path / "moved")
    assert prepare(data_of(tmp_path, moved), lines.append).folder == first.folder
    (moved / "00.txt").write_text("something else")
    changed = prepare(data_of(tmp_path, moved), lines.append)
    assert changed.folder != first.folder
    assert changed.fingerprint != first.fingerprint
    assert prepare(data_of(tmp_path, moved, vocab=280), QUIET).vocab <= 280
    (changed.folder / "train.npy").write_bytes(b"")
    assert len(prepare(data_of(tmp_path, moved), lines.append).train) == len(changed.train)
    assert any("damaged" in line for line in lines)


def test_what_is_read_from_a_folder(tmp_path):
    for name in ("b.md", "a.txt", "deep/er/c.py", ".git/d.txt", "e.png", "__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert [file.name for file in find_files(tmp_path)] == ["a.txt", "b.md", "c.py", "g.txt.gz"]
    assert [file.name for file in find_files(tmp_path / "*.md")] == ["b.md"]
    assert [file.name for file in find_files(tmp_path / "e.png")] == ["e.png"]


def test_docstrings_are_whole_and_limited(tmp_path):
    streams = prepare(LMData(limit=50, vocab=400, cache=tmp_path), QUIET)
    assert (np.asarray(streams.train) == END_ID).sum() == 46
    assert (np.asarray(streams.test) == END_ID).sum() == 6
    assert "\n" in streams.tokenizer.decode(streams.train[1:500].tolist())


RUN = "workload: lm\ndata: {source: text, path: PATH, cache: cache}\ntrain: {steps: 1}\nparallel: {threads: 1}\n"
BAD = {
    "absent": ("nothing.txt", {}, ("there is no such file or folder",)),
    "misspelt": ("texts.tx", {"texts.txt": "a"}, ("did you mean 'texts.txt'?",)),
    "no folder": ("no/file.txt", {}, ("nor does the folder",)),
    "empty file": ("empty.txt", {"empty.txt": ""}, ("the file is empty",)),
    "empty folder": ("folder", {"folder/picture.png": "x"}, ("has no text files", ".txt .md")),
    "all empty": ("folder", {"folder/a.txt": "", "folder/b.txt": ""}, ("all 2 files are empty",)),
    "blank": ("blank.txt", {"blank.txt": " \n\n "}, ("there is no text in it",)),
    "one document": ("one.txt", {"one.txt": "short"}, ("none can be held out", "16 KiB")),
    "pattern": ("*.text", {"a.txt": "x"}, ("no file matches this pattern",)),
    "not utf-8": ("latin.txt", {"latin.txt": b"caf\xe9\n" * 9}, ("latin.txt line 1 (byte 0xe9)", "iconv")),
}


@pytest.mark.parametrize("row", BAD)
def test_bad_input_is_explained(tmp_path, monkeypatch, capsys, row):
    path, files, said = BAD[row]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.replace("PATH", f"'{path}'"))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as ended:
        main(shlex.split("train run.yaml --quiet"))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(word in error for word in said), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": "text"}, "data.path: not given"),
        ({"source": "docstrings", "path": "a.txt"}, "source docstrings does not read it"),
    ],
)
def test_fields_that_do_not_go_together(fields, said):
    with pytest.raises(UserError, match=said):
        open_documents(LMData(**fields))
