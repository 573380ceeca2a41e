"""Models of strangers: a tokeniser or a checkpoint that asks for more than there is costs one line."""

import pickle
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.data.corpora import limited_process
from paceline.data.corpora.limited_process import LimitedTokenizer
from paceline.data.corpora.tokenizer import restore_tokenizer
from paceline.errors import UserError
from paceline.trainer.checkpoint.reader import find_newest, read_tensors
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.workloads.transformers.chat import ChatTemplate
from results import expect_error

GROW = normalizers.Replace("a", "a" * 1000)
TEXTS = ["it's größer, 世界 123 [MASK]", "", "x" * 500, " two  blanks"]


def build(normalizer=None, pre_tokenizer=None, decoder=None):
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["[MASK]"], initial_alphabet=alphabet)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([*TEXTS, "a b"] * 3, trainer)
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoder or decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizer or tokenizer.pre_tokenizer
    tokenizer.encode_special_tokens = True
    return tokenizer


BOMBS = {
    "chained Replace": build(normalizers.Sequence([GROW] * 6)),
    "a regular expression": build(normalizers.Sequence([normalizers.Replace(Regex("."), "a" * 1000)] * 4)),
    "backtracking": build(None, pre_tokenizers.Split(Regex(r"(\w+)+$"), "isolated")),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokeniser_that_grows_a_text_is_a_line(bomb):
    tokenizer = restore_tokenizer(BOMBS[bomb].to_str())
    began = time.monotonic()
    with expect_error("invalid-data", "data.tokenizer"):
        tokenizer.encode_batch_fast(["a" * 40 + "!"], add_special_tokens=False)
    assert time.monotonic() - began < 60


def test_a_decoder_that_grows_ids_is_a_line_and_one_that_takes_long_is_stopped(monkeypatch):
    growing = decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 6)
    tokenizer = restore_tokenizer(build(None, None, growing).to_str())
    with pytest.raises(UserError):
        tokenizer.decode([tokenizer.token_to_id("a")])
    monkeypatch.setattr(limited_process, "PATIENCE_S", 0.0)
    monkeypatch.setattr(limited_process, "CHARACTERS_S", 10**9)
    with pytest.raises(UserError, match="takes too long"):
        tokenizer.encode("a")


DOUBLE = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(("text", "patience_s"), [("{{ 'a' * 10**11 }}", 60.0), (DOUBLE, 60.0), (NESTED, 1.0)])
def test_a_chat_template_that_grows_or_never_ends_is_a_line(monkeypatch, text, patience_s):
    monkeypatch.setattr(limited_process, "PATIENCE_S", patience_s)
    with expect_error("invalid-data", "data.template"):
        ChatTemplate(text, Path("chat_template.jinja"), {}).render([{"role": "user", "content": "a"}], "row 1")


SPLIT = pre_tokenizers.Split(Regex(r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
BYTES = pre_tokenizers.ByteLevel(use_regex=False)
ORDINARY = {
    "ours": (build(), False),
    "lower case": (build(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])), False),
    "twice": (build(normalizers.Sequence([normalizers.NFKC(), normalizers.NFKC()])), True),
    "Split": (build(normalizers.Replace(Regex(" {2,}"), " "), pre_tokenizers.Sequence([SPLIT, BYTES])), True),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_an_ordinary_tokeniser_answers_does_not_change(name):
    plain, limited = ORDINARY[name]
    plain.enable_truncation(20)
    tokenizer = restore_tokenizer(plain.to_str())
    assert isinstance(tokenizer, LimitedTokenizer) == limited
    for text, encoded in zip(TEXTS, tokenizer.encode_batch_fast(TEXTS), strict=True):
        expected = plain.encode(text)
        assert (encoded.ids, bool(encoded.overflowing)) == (expected.ids, bool(expected.overflowing))
        assert tokenizer.encode(text).ids == expected.ids
        assert tokenizer.decode(encoded.ids) == plain.decode(expected.ids)
    assert tokenizer.to_str() == plain.to_str()
    assert tokenizer.get_vocab_size() == 300


def test_padding_and_strides_of_a_file_are_dropped():
    tokenizer = build()
    tokenizer.enable_padding(length=10**12)
    tokenizer.enable_truncation(500, stride=499)
    restored = restore_tokenizer(tokenizer.to_str())
    assert (restored.padding, restored.truncation["stride"]) == (None, 0)
    assert len(restored.encode("a b")) < 10


def test_tensors_that_claim_more_than_their_files_hold_take_no_memory(tmp_path):
    checkpoints = CheckpointWriter(tmp_path, 2)
    checkpoints.save({"model": {"a": torch.ones(3, 4)}}, {"step": 1})
    checkpoints.close()
    checkpoint = find_newest(tmp_path, print)
    assert read_tensors(checkpoint)["a"].sum() == 12
    file = checkpoint.path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["model.a"].size = torch.Size((10**7, 10**6))
    file.write_bytes(pickle.dumps(metadata))
    with expect_error("damaged", match="40,000,000,000,000"):
        read_tensors(checkpoint)
