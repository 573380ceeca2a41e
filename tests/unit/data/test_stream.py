"""Texts for language models: nothing held out is trained on, damage is repaired, and bad files say so."""

import gzip
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from paceline.data import cache
from paceline.data.cache import ArrayWriter, DamagedEntry, _verified, describe_array, map_array, verify_entry
from paceline.data.corpora import docstrings
from paceline.data.corpora.documents import PART_CHARACTERS, TokenStreams, Windows, find_text_files, open_documents
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.corpora.tokenizer import read_tokenizer
from paceline.workloads.classifier.sections import TextData
from paceline.workloads.lm.sections import LMData
from results import expect_error

QUIET = lambda line: None  # noqa: E731


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"This is text {i}: " + f"word{i} größer 世界\n" * (i + 1), "utf-8")
    return folder


def data_of(tmp_path, path, **fields):
    return LMData(**{"source": "text", "path": path, "vocab": 300, "cache": tmp_path / "cache", **fields})


def prepare_stream(folder):
    (folder / "a.txt").write_text("some words\n" * 4000)
    return TokenStreams.prepare(data_of(folder, folder / "a.txt"))


def test_tokens_decode_to_the_texts(tmp_path, texts):
    streams = TokenStreams.prepare(data_of(tmp_path, texts), QUIET)
    documents = {False: [], True: []}
    for part in open_documents(data_of(tmp_path, texts)).parts():
        documents[part.held_out].append(part.text)
    for held_out, ids in ((False, streams.train), (True, streams.test)):
        assert ids[0] == ids[-1] == 0
        parts = np.split(ids, np.flatnonzero(ids == 0))[1:-1]
        assert [streams.tokenizer.decode(part[1:].tolist()) for part in parts] == documents[held_out]
    assert len(documents[False]) + len(documents[True]) == 40
    assert 1 <= len(documents[True]) <= 12


def test_a_long_file_is_cut_into_parts_that_join_again(tmp_path):
    text = "".join(f"line {i} of a long text\n" for i in range(20_000)) + "x" * 40_000
    (tmp_path / "long.txt").write_text(text)
    parts = list(open_documents(data_of(tmp_path, tmp_path / "long.txt")).parts())
    assert "".join(part.text for part in parts) == text
    assert max(len(part.text) for part in parts) <= PART_CHARACTERS
    held_out = sum(len(part.text) for part in parts if part.held_out) / len(text)
    assert 0.02 < held_out < 0.3
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        assert part.ends == (after is None or after.held_out != part.held_out)


@pytest.mark.parametrize("damage", ["the train split has", "train.npy was changed"])
def test_damage_to_a_cached_stream_is_named_and_mended(damage, tmp_path, texts):
    first = TokenStreams.prepare(data_of(tmp_path, texts), QUIET)
    ids, meta, array = np.array(first.train), first.folder / "meta.json", first.folder / "train.npy"
    if "split" in damage:
        facts = json.loads(meta.read_text())
        del facts["seal"]
        facts["train"]["tokens"] -= 1
        cache.write_facts(meta, facts)
    else:
        array.write_bytes(array.read_bytes()[:-4] + b"\xff" * 4)
    said = []
    again = TokenStreams.prepare(data_of(tmp_path, texts), said.append)
    assert f"damaged ({damage}" in said[0]
    assert np.array_equal(again.train, ids)
    assert again.fingerprint == first.fingerprint


def test_what_is_read_from_a_folder(tmp_path):
    for name in ("b.md", "a.txt", "deep/er/c.py", ".git/d.txt", "e.png", "__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert [file.name for file in find_text_files(tmp_path)] == ["a.txt", "b.md", "c.py", "g.txt.gz"]
    assert [file.name for file in find_text_files(tmp_path / "*.md")] == ["b.md"]
    assert [file.name for file in find_text_files(tmp_path / "e.png")] == ["e.png"]


def test_docstrings_are_whole_and_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "ENOUGH_PER_CLASS", 60)
    streams = TokenStreams.prepare(LMData(limit=50, vocab=400, cache=tmp_path), QUIET)
    assert (np.asarray(streams.train) == 0).sum() == 46
    assert (np.asarray(streams.test) == 0).sum() == 6
    assert "\n" in streams.tokenizer.decode(streams.train[1:500].tolist())


def tokens_of(length):
    return np.random.default_rng(length).integers(0, 300, length).astype(np.uint16)


@pytest.mark.parametrize("length", [2, 65, 5001])
@pytest.mark.parametrize("sequence", [1, 7, 64, 10_000])
def test_every_token_is_predicted_exactly_once(length, sequence):
    ids = tokens_of(length)
    windows = Windows(ids, sequence)
    seen = np.zeros(len(ids), np.int64)
    samples = np.random.default_rng(1).permutation(len(windows))
    for some in np.array_split(samples, -(-len(samples) // 5)):
        batch = windows.batch(some, some)
        assert batch.tokens.shape == batch.targets.shape == (len(some), sequence)
        for i, tokens, targets in zip(some, batch.tokens.numpy(), batch.targets.numpy(), strict=True):
            counted = int((targets >= 0).sum())
            assert counted == windows.cost(np.array([i]))[0] > 0
            begin = i * sequence
            assert (tokens[:counted] == ids[begin : begin + counted]).all()
            assert (targets[:counted] == ids[begin + 1 : begin + counted + 1]).all()
            assert (targets[counted:] == -100).all()
            seen[begin + 1 : begin + counted + 1] += 1
    assert seen[0] == 0, "nothing is before the first end token"
    assert (seen[1:] == 1).all()


def test_padded_rows_count_nothing():
    windows = Windows(tokens_of(200), 16)
    ids = np.array([3, 1])
    plain, padded = windows.batch(ids, ids), windows.padded(ids, ids, 5)
    assert all(part[:2].equal(whole) for part, whole in zip(padded, plain, strict=True))
    assert padded.targets[2:].tolist() == [[-100] * 16] * 3


@pytest.fixture
def array(tmp_path):
    with ArrayWriter(tmp_path / "x.npy", np.int64) as file:
        file.append(np.arange(20))
    assert file.facts == describe_array(tmp_path / "x.npy")
    return tmp_path / "x.npy"


def test_an_array_with_any_bit_of_its_header_flipped_is_the_same_or_damaged(array):
    """Numpy reads a header as Python, so that it may fail as Python does; `<` and `>` differ by one bit."""
    facts = describe_array(array)
    whole, damaged = array.read_bytes(), 0
    for place in range(8 * (whole.index(b"}") + 1)):  # blanks follow
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        array.write_bytes(content)
        _verified.clear()
        try:
            verify_entry(array.parent, {"x.npy": facts})
        except DamagedEntry:
            damaged += 1
        else:
            assert map_array(array).tolist() == list(range(20))
    assert damaged > 100


WORDS = ["the", "wheel", "road", "Hill", "hill", "wind"]


def write_tokenizer(file, special, normalizer=None):
    tokenizer = Tokenizer(models.WordLevel({"?": 0} | {word: i for i, word in enumerate(WORDS, 1)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizer
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(file))
    return file


@pytest.fixture
def labelled(tmp_path):
    """A function that prepares a few texts with a tokenizer."""
    texts, file = (
        ["the wheel", "the road the hill", "Hill wind", "", "wind wind wind wind [MASK]"],
        tmp_path / "r.jsonl",
    )
    rows = [{"text": text, "label": label} for text in texts * 4 for label in (0, 1)]
    file.write_text("\n".join(map(json.dumps, rows)))
    given = {"source": "jsonl", "path": file, "test_path": file, "max_length": 4, "cache": tmp_path / "cache"}
    return lambda tokenizer, log=QUIET, **more: LabelledCorpus.prepare(
        TextData(**given, tokenizer=tokenizer, **more), log
    )


def test_labelled_texts_have_its_tokens_and_its_mask(tmp_path, labelled):
    file = write_tokenizer(tmp_path / "t.json", ["<mask>"])
    corpus = labelled(file)
    assert (corpus.vocab, corpus.special) == (8, 7)
    five = [corpus.train.gather(np.array([i])).tolist() for i in range(0, 10, 2)]
    assert five == [[1, 2], [1, 3, 1, 5], [4, 6], [7], [6, 6, 6, 6]], "cut at data.max_length, an empty one is the mask"
    assert labelled(file, lowercase=True).train.gather(np.array([4])).tolist() == [5, 6]
    stripped = write_tokenizer(tmp_path / "strip.json", ["<mask>"], normalizers.Replace("wheel", "wind"))
    assert labelled(stripped, lowercase=True).train.gather(np.array([0])).tolist() == [1, 6]
    moved = file.rename(tmp_path / "moved.json")
    assert labelled(moved).folder == corpus.folder == labelled(moved, vocab=300).folder, "known by its content"
    other = labelled(write_tokenizer(moved, ["<mask>", "more"]))
    assert (other.folder != corpus.folder, other.vocab) == (True, 9)


def test_another_special_token_is_taken_and_said(tmp_path, labelled):
    said = []
    corpus = labelled(write_tokenizer(tmp_path / "t.json", ["</s>", "<unk>"]), said.append)
    assert corpus.special == corpus.tokenizer.token_to_id("<unk>")
    assert any("[MASK]" in line and "<unk>" in line for line in said)


def test_documents_end_with_its_end(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text("the wheel " * (i + 1))
    file = write_tokenizer(tmp_path / "t.json", ["<|endoftext|>"])
    streams = TokenStreams.prepare(data_of(tmp_path, texts, tokenizer=file))
    assert (streams.vocab, streams.special) == (8, 7)
    ids = np.concatenate([streams.train, streams.test]).tolist()
    assert (ids[0], ids[-1], ids.count(7), set(ids)) == (7, 7, 12 + 2, {1, 2, 7})
    without = write_tokenizer(tmp_path / "none.json", ["<odd>"])
    with expect_error("invalid-data", "data.tokenizer", match=r"add one of \[END\]"):
        TokenStreams.prepare(data_of(tmp_path, texts, tokenizer=without))


BROKEN = {
    "not JSON": (lambda file: file.write_text("{"), "invalid-format"),
    "bytes": (lambda file: file.write_bytes(bytes(range(256))), "invalid-format"),
    "a folder": (lambda file: file.mkdir(), "invalid-data"),
    "nothing": (lambda file: None, "not-found"),
    "without words": (lambda file: Tokenizer(models.BPE()).save(str(file)), "invalid-data"),
}


@pytest.mark.parametrize(("make", "code"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_has_a_code(tmp_path, make, code):
    make(tmp_path / "t.json")
    with expect_error(code, "data.tokenizer", match=r"t\.json"):
        read_tokenizer(tmp_path / "t.json")
