"""First weights: drawn as the library draws them, by name, into a skeleton that had no memory."""

import pytest
import torch

from paceline.errors import UserError
from paceline.workload import build_workload
from paceline.workloads.transformers.build import build_config, build_transformer
from paceline.workloads.transformers.model_files import ConfigFile, read_config


def drawn(spec):
    workload = build_workload(spec)
    return workload.model()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_what_has_no_memory_is_filled_as_the_library_does(kind, hf, run_file):
    import transformers

    task = {"model.task": "sequence_classification"} if kind == "bert" else {}
    spec = run_file(kind, **task)
    config = build_config(read_config(spec.model))
    auto = transformers.AutoModelForSequenceClassification if task else transformers.AutoModelForCausalLM
    theirs, ours = auto.from_config(config), drawn(spec)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a.isfinite().all(), name
        assert torch.equal(a, b) if b.std() == 0 else 0.7 < (a.std() / b.std()).item() < 1.4, name
    again = drawn(spec)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    other = drawn(spec.replace({"train.seed": 1}))
    assert not all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_shared_weights_stay_shared(run_file):
    model = drawn(run_file("gpt2"))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_code_beside_a_config_is_not_run(tmp_path):
    values = {"model_type": "mine", "auto_map": {"AutoConfig": "modeling_mine.MyConfig"}}
    with pytest.raises(UserError, match="its own code"):
        build_config(ConfigFile(tmp_path / "config.json", values))


def test_a_task_that_the_architecture_does_not_have(tmp_path):
    config = build_config(ConfigFile(tmp_path / "config.json", {"model_type": "vit"}))
    with pytest.raises(UserError, match="'vit'"):
        build_transformer(config, "causal_lm")
