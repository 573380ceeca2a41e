"""A tokenizer.json of the user's: texts have its tokens, its special tokens are found, and a broken file says so."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from paceline.data.corpora.documents import TokenStreams
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.corpora.tokenizer import read_tokenizer
from paceline.errors import UserError
from paceline.workloads.classifier.sections import TextData
from paceline.workloads.lm.sections import LMData

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


def write_rows(folder):
    texts = ["the wheel", "the road the hill", "Hill wind", "", "wind wind wind wind [MASK]"] * 8
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{t}", "label": i % 2}) + "\n" for i, t in enumerate(texts)))
    return rows


def labelled(folder, tokenizer, said=None, **fields):
    given = {"source": "jsonl", "path": folder / "rows.jsonl", "test_path": folder / "rows.jsonl", "max_length": 4}
    data = TextData(**given, cache=folder / "cache", tokenizer=tokenizer, **fields)
    return LabelledCorpus.prepare(data, (said if said is not None else []).append)


def test_labelled_texts_have_its_tokens_and_its_mask(tmp_path):
    write_rows(tmp_path)
    corpus = labelled(tmp_path, write_tokenizer(tmp_path / "t.json", ["<mask>"]))
    assert (corpus.vocab, corpus.special) == (8, 7)
    five = [corpus.train.gather(np.array([i])).tolist() for i in range(5)]
    assert five == [[1, 2], [1, 3, 1, 5], [4, 6], [7], [6, 6, 6, 6]], "cut at data.max_length, an empty one is the mask"
    assert labelled(tmp_path, tmp_path / "t.json", lowercase=True).train.gather(np.array([2])).tolist() == [5, 6]
    stripped = write_tokenizer(tmp_path / "strip.json", ["<mask>"], normalizers.Replace("wheel", "wind"))
    assert labelled(tmp_path, stripped, lowercase=True).train.gather(np.array([0])).tolist() == [1, 6]


def test_the_cache_knows_it_by_its_content(tmp_path):
    write_rows(tmp_path)
    file = write_tokenizer(tmp_path / "t.json", ["<mask>"])
    first = labelled(tmp_path, file)
    moved = file.rename(tmp_path / "moved.json")
    assert labelled(tmp_path, moved).folder == first.folder == labelled(tmp_path, moved, vocab=300).folder
    write_tokenizer(moved, ["<mask>", "more"])
    other = labelled(tmp_path, moved)
    assert (other.folder != first.folder, other.vocab) == (True, 9)


def test_another_special_token_is_taken_and_said(tmp_path):
    write_rows(tmp_path)
    said = []
    corpus = labelled(tmp_path, write_tokenizer(tmp_path / "t.json", ["</s>", "<unk>"]), said)
    assert corpus.special == corpus.tokenizer.token_to_id("<unk>")
    assert any("[MASK]" in line and "<unk>" in line for line in said)


def test_documents_end_with_its_end(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text("the wheel " * (i + 1))
    file = write_tokenizer(tmp_path / "t.json", ["<|endoftext|>"])
    streams = TokenStreams.prepare(LMData(source="text", path=texts, tokenizer=file, cache=tmp_path / "cache"))
    assert (streams.vocab, streams.special) == (8, 7)
    ids = np.concatenate([streams.train, streams.test])
    assert ids[0] == ids[-1] == 7
    assert (ids == 7).sum() == 12 + 2
    assert set(ids.tolist()) == {1, 2, 7}
    without = write_tokenizer(tmp_path / "none.json", ["<odd>"])
    data = LMData(source="text", path=texts, tokenizer=without, cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"add one of \[END\]") as refused:
        TokenStreams.prepare(data)
    assert (refused.value.code, refused.value.key) == ("invalid-data", "data.tokenizer")


BROKEN = {
    "not JSON": (lambda file: file.write_text("{"), "invalid-format"),
    "JSON of something else": (lambda file: file.write_text('{"a": 1}'), "invalid-format"),
    "bytes": (lambda file: file.write_bytes(bytes(range(256))), "invalid-format"),
    "a folder": (lambda file: file.mkdir(), "invalid-data"),
    "nothing": (lambda file: None, "not-found"),
    "without words": (lambda file: Tokenizer(models.BPE()).save(str(file)), "invalid-data"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_has_a_code(tmp_path, name):
    make, code = BROKEN[name]
    make(tmp_path / "t.json")
    with pytest.raises(UserError, match=r"t\.json") as refused:
        read_tokenizer(tmp_path / "t.json")
    assert (refused.value.code, refused.value.key) == (code, "data.tokenizer")
