"""Models of the library transformers under several layouts: weights that are read in shards, shared and frozen ones."""

import pytest

import hf_models
from paceline.config import build_spec
from paceline.trials.check import check
from paceline.workloads.transformers.sections import TASKS

pytestmark = pytest.mark.usefixtures("warm_ranks")
LORA = {"lora_rank": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    hf_models.save("gpt2", folder / "gpt2")
    hf_models.save("llama", folder / "llama")
    hf_models.save("llama", folder / "llama_bf16", dtype="bfloat16")
    hf_models.labelled(folder / "texts.csv")
    (folder / "texts.txt").write_text("\n".join(hf_models.TEXTS * 40))
    return folder


@pytest.mark.parametrize(
    ("kind", "model", "layouts"),
    [
        ("llama_bf16", {}, ["single", "fsdp:2"]),
        ("gpt2", {}, ["single", "ddp:2", "fsdp:2", "tensor:2", "pipeline:2"]),
        ("gpt2", {"dropout": False}, ["single", "context:2"]),
        ("llama", {**LORA, "task": "sequence_classification", "match": "some"}, ["single", "zero1:2", "fsdp:2"]),
        ("llama_bf16", LORA, ["single", "fsdp:2"]),
        ("llama", {}, ["single", "tensor:2", "fsdp:2+tensor:2", "fsdp:2+pipeline:2"]),
    ],
)
def test_the_answer_does_not_depend_on_the_layout(kind, model, layouts, folder, corpus_cache):
    """Fine-tuned whole, with the embedding as its head, or in bf16; adapters with a new head, or beside bf16."""
    half = kind.endswith("bf16")
    labelled = "task" in model
    data = {"source": "csv" if labelled else "text", "path": str(folder / ("texts.csv" if labelled else "texts.txt"))}
    train = {"steps": 3, "global_batch": 7, "lr": 1e-3, "log_every": 1}
    spec = build_spec(
        {
            "workload": "transformers",
            "model": {"init_from": str(folder / kind), **model},
            "data": {**data, "sequence": 16, "max_length": 24, "cache": str(corpus_cache)},
            "train": {**train, "precision": "bf16" if half else "fp32"},
            "parallel": {"threads": 1, "timeout_s": 120},
        }
    )
    parity = check(spec, layouts=layouts, steps=3)
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]
    assert all(row.loss < (1e-4 if half else 1e-6) for row in parity.rows[1:])


def test_packed_conversations_give_the_same_answer_under_each_layout(folder, corpus_cache):
    """With weights in 4 bits too."""
    model = {"init_from": str(hf_models.save_chat(folder / "chat")), "lora_rank": 2, "quantize": "nf4"}
    data = {"source": "jsonl", "path": str(hf_models.write_chats(folder / "chat.jsonl")), "sequence": 64}
    values = {"model": model, "data": {**data, "cache": str(corpus_cache)}, "train": {"global_batch": 7, "lr": 1e-3}}
    values |= {"workload": "transformers", "parallel": {"threads": 1, "timeout_s": 120}}
    parity = check(build_spec(values), layouts=["single", "ddp:2", "fsdp:2"], steps=3)
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]
    assert all(row.loss < 1e-6 for row in parity.rows[1:])


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("t5", "seq2seq_lm"),
        ("bert", "masked_lm"),
        ("roberta", "token_classification"),
        ("vit", "image_classification"),
    ],
)
def test_no_task_depends_on_the_layout(kind, task, folder, corpus_cache):
    """Sharded and divided; the masks of a sample are its own, and an encoder is sharded as its decoder is."""
    data = hf_models.write_task_data(folder / "data")[task]
    model = hf_models.save(kind, folder / task, TASKS[task].auto)
    values = {
        "model": {"init_from": str(model), "task": task, "match": "some"},
        "train": {"global_batch": 7, "lr": 1e-3},
    }
    values |= {"data": {**data, "cache": str(corpus_cache)}, "parallel": {"threads": 1, "timeout_s": 120}}
    parity = check(
        build_spec({"workload": "transformers", **values}),
        layouts=["single", "fsdp:2", "tensor:2"],
        steps=3,
    )
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]


def test_stages_of_an_encoder_and_a_decoder_send_both_on(folder, corpus_cache):
    """Texts of other lengths in each pass, with masks in some; the embedding is part of both stages."""
    data = hf_models.write_task_data(folder / "data")["seq2seq_lm"]
    model = hf_models.save("t5", folder / "t5", TASKS["seq2seq_lm"].auto)
    values = {"model": {"init_from": str(model), "task": "seq2seq_lm", "dropout": False}, "train": {"global_batch": 7}}
    values |= {"data": {**data, "cache": str(corpus_cache)}, "parallel": {"threads": 1, "timeout_s": 120}}
    layouts = ["single", "pipeline:2", "pipeline:3"]
    parity = check(build_spec({"workload": "transformers", **values}), layouts=layouts, steps=2)
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]
