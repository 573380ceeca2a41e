"""Models of the library transformers under several layouts: weights that are read in shards, shared and frozen ones."""

import pytest

import hf_models
from paceline.config import build_spec
from paceline.workloads.transformers.sections import TASKS
from results import check_holds

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


@pytest.fixture
def make_spec(corpus_cache):
    def make(model, data, **train):
        values = {"workload": "transformers", "parallel": {"threads": 1, "timeout_s": 120}}
        values |= {"model": model, "data": {**data, "cache": str(corpus_cache)}}
        return build_spec({**values, "train": {"global_batch": 7, "lr": 1e-3, **train}})

    return make


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
def test_the_answer_does_not_depend_on_the_layout(kind, model, layouts, folder, make_spec):
    """Fine-tuned whole, with the embedding as its head, or in bf16; adapters with a new head, or beside bf16."""
    source, file = ("csv", "texts.csv") if "task" in model else ("text", "texts.txt")
    precision, tolerance = ("bf16", 1e-4) if kind.endswith("bf16") else ("fp32", 1e-6)
    data = {"source": source, "path": str(folder / file), "sequence": 16, "max_length": 24}
    spec = make_spec({"init_from": str(folder / kind), **model}, data, precision=precision)
    parity = check_holds(spec, layouts=layouts, steps=3)
    assert all(row.loss < tolerance for row in parity.rows[1:])


def test_packed_conversations_give_the_same_answer_under_each_layout(folder, make_spec):
    """With weights in 4 bits too."""
    model = {"init_from": str(hf_models.save_chat(folder / "chat")), "lora_rank": 2, "quantize": "nf4"}
    data = {"source": "jsonl", "path": str(hf_models.write_chats(folder / "chat.jsonl")), "sequence": 64}
    parity = check_holds(make_spec(model, data), layouts=["single", "ddp:2", "fsdp:2"], steps=3)
    assert all(row.loss < 1e-6 for row in parity.rows[1:])


ON_TWO = ["single", "fsdp:2", "tensor:2"]


@pytest.mark.parametrize(
    ("kind", "task", "layouts", "changes"),
    [
        ("deberta-v2", "masked_lm", ["single", "ddp:2"], {}),
        ("t5", "seq2seq_lm", ON_TWO, {}),
        ("bert", "masked_lm", ON_TWO, {}),
        ("roberta", "token_classification", ON_TWO, {}),
        ("vit", "image_classification", ON_TWO, {}),
        ("t5", "seq2seq_lm", ["single", "pipeline:2", "pipeline:3"], {"dropout": False}),
    ],
)
def test_no_task_depends_on_the_layout(kind, task, layouts, changes, folder, make_spec):
    """Sharded and divided; the masks of a sample are its own, and an encoder is sharded as its decoder is.

    In a pipeline texts of other lengths in each pass, with masks in some; the embedding is part of both stages.
    """
    data = hf_models.write_task_data(folder / "data")[task]
    model = hf_models.save(kind, folder / task, TASKS[task].auto)
    spec = make_spec({"init_from": str(model), "task": task, "match": "some", **changes}, data)
    check_holds(spec, layouts=layouts, steps=3)
