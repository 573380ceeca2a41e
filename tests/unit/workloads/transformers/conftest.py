"""Models of the library, saved once."""

import pytest

import hf_models
from paceline.config import build_spec


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """A folder with the folders llama, llama_bf16, gpt2, bert and t5, and data of each task."""
    folder = tmp_path_factory.mktemp("hf")
    hf_models.save("llama", folder / "llama")
    hf_models.save("llama", folder / "llama_bf16", dtype="bfloat16")
    hf_models.save("gpt2", folder / "gpt2")
    hf_models.save("bert", folder / "bert", "AutoModelForSequenceClassification")
    hf_models.save("t5", folder / "t5", "AutoModelForSeq2SeqLM")
    hf_models.save_chat(folder / "chat")
    hf_models.write_chats(folder / "chat.jsonl", 100)
    hf_models.write_task_data(folder / "data")
    hf_models.labelled(folder / "texts.csv")
    (folder / "texts.txt").write_text("\n".join(hf_models.TEXTS * 40))
    return folder


@pytest.fixture(scope="session")
def run_file(hf, corpus_cache):
    """A run file that starts with one of the folders; a classifier where the task says so."""

    def run_file(kind, **overrides):
        values = {
            "name": kind,
            "workload": "transformers",
            "model": {"init_from": str(hf / kind)},
            "data": {"source": "text", "path": str(hf / "texts.txt"), "sequence": 16, "cache": str(corpus_cache)},
            "train": {"steps": 4, "global_batch": 8, "lr": 1e-2, "log_every": 1},
            "parallel": {"threads": 1},
        }
        if overrides.get("model.task") == "sequence_classification":
            values["data"] |= {"source": "csv", "path": str(hf / "texts.csv"), "max_length": 24}
        return build_spec(values).replace(overrides) if overrides else build_spec(values)

    return run_file
