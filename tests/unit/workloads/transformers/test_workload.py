"""Training, adapters and export of models that the library saved; compared with the library itself."""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import hf_models
import paceline
from hf_models import TEXTS
from paceline import train
from paceline.config import build_spec, load
from paceline.data.corpora.labelled import open_source
from paceline.errors import UserError
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload
from results import tensors_of

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
CLASSIFY = {"model.task": "sequence_classification", "model.match": "some"}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)).logits


@pytest.fixture(scope="module")
def tuned(run_file, tmp_path_factory):
    """A fine-tuned model, with tied weights."""
    return train(run_file("gpt2"), tmp_path_factory.mktemp("tuned"), show=False)


@pytest.fixture(scope="module")
def adapted(run_file, tmp_path_factory):
    """One with adapters."""
    adapters = {"model.lora_rank": 2, "model.lora_targets": ["q_proj", "down_proj"]}
    spec = run_file("llama", **adapters, **{"train.steps": 8, "train.lr": 0.1})
    return train(spec, tmp_path_factory.mktemp("adapted"), show=False)


def test_the_first_loss_is_that_of_the_library(tuned, run_file, hf):
    import transformers

    workload = build_workload(run_file("gpt2"))
    samples = workload.data("train")
    inputs, targets = samples.batch(np.arange(len(samples)), np.zeros(len(samples)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf / "gpt2")
    start = next(read_events(RunDir(tuned.path).events_file(0), "start"))
    assert start["weights"]["left"] == start["weights"]["drawn"] == []
    with torch.no_grad():
        mine = workload.loss(theirs.eval(), type(samples.batch(np.arange(1), np.zeros(1)))(inputs, targets))
        their = theirs(**inputs, labels=None).logits
    both = torch.nn.functional.cross_entropy(their.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert float(mine[0] / mine[1]) == pytest.approx(float(both), rel=1e-5)
    assert tuned.summary.loss_first == pytest.approx(float(both), rel=0.05)
    assert tuned.summary.loss_last < tuned.summary.loss_first


def test_from_pretrained_reads_what_is_exported(tuned, tmp_path):
    import transformers

    model = paceline.open(tuned.path).model
    paceline.export(tuned.path, tmp_path / "out")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = [tokenizer("good number 3 of a list").input_ids]
    assert ids[0][0] == 1, "as the folder's own tokenizer.json marks a text"
    torch.testing.assert_close(logits(there, ids), logits(model, ids), rtol=0, atol=0)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors"), "it is shared"
    with pytest.raises(UserError, match="paceline sample"):
        paceline.open(tuned.path).predict(["good"])


def test_adapters_leave_the_base_as_it_was(adapted, hf):
    def digest(tensor):
        return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

    weights, base = adapted.weights(), load_file(hf / "llama" / "model.safetensors")
    assert {name: digest(tensor) for name, tensor in base.items()} == {name: digest(weights[name]) for name in base}
    assert {name.rpartition(".")[2] for name in weights.keys() - base.keys()} == {"lora_A", "lora_B"}
    states = {name.rpartition(".")[0] for name in tensors_of(adapted, "optim.")}
    assert states == weights.keys() - base.keys()
    assert any(weights[name].any() for name in states if name.endswith("lora_B"))
    assert adapted.summary.loss_last < adapted.summary.loss_first


def test_bf16_base_gives_the_same_losses(hf, run_file, tmp_path):
    """Half the memory of one that is widened, of which products take bf16 all the same; nothing is lost in the end."""
    import transformers

    wide = tmp_path / "wide"
    shutil.copytree(hf / "llama_bf16", wide)
    config = (wide / "config.json").read_text()
    assert '"bfloat16"' in config
    (wide / "config.json").write_text(config.replace('"bfloat16"', '"float32"'))
    given = {"model.lora_rank": 2, "train.precision": "bf16"}
    starts = [{"model.init_from": str(start), "name": start.name} for start in (hf / "llama_bf16", wide)]
    result, other = (train(run_file("llama_bf16", **given, **start), tmp_path, show=False) for start in starts)
    losses = [[e["loss"] for e in read_events(RunDir(r.path).events_file(0), "step")] for r in (result, other)]
    assert losses[0] == losses[1]
    weights, base = result.weights(), load_file(hf / "llama_bf16" / "model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert weights["model.layers.0.mlp.up_proj.lora_A"].dtype == torch.float32
    assert all(torch.equal(weights[name], tensor.to(weights[name].dtype)) for name, tensor in base.items())
    paceline.export(result.path, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = [list(range(5, 25))]
    ours = logits(paceline.open(result.path).model, ids)
    torch.testing.assert_close(logits(merged, ids), ours, rtol=1e-5, atol=1e-5)


def test_resume_without_the_first_folder(hf, run_file, tmp_path):
    shutil.copytree(hf / "llama", tmp_path / "llama")
    started = {"model.init_from": str(tmp_path / "llama"), "train.steps": 1, "model.lora_rank": 2}
    first = train(run_file("llama", **started), tmp_path, show=False)
    shutil.rmtree(tmp_path / "llama")
    for length in (2, 3):
        assert paceline.resume(first.path, {"train.steps": length}).summary.trained.steps == length


def test_start_with_the_weights_of_a_run(tuned, run_file, tmp_path):
    """Its architecture and its tokeniser are those that the run kept."""
    spec = run_file("gpt2", **{"model.init_from": str(tuned.path), "train.steps": 1, "train.lr": 1e-9})
    first = train(spec, tmp_path, show=False).summary.loss_first
    assert first < 0.99 * tuned.summary.loss_first


def test_adapters_are_exported_merged_and_for_peft(adapted, hf, tmp_path):
    import peft
    import transformers

    model = paceline.open(adapted.path).model
    paceline.export(adapted.path, tmp_path / "out")
    ids = [list(range(5, 25))]
    ours = logits(model, ids)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(hf / "llama").eval()
    assert (logits(base, ids) - ours).abs().max() > 1e-3
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    torch.testing.assert_close(logits(merged, ids), ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(beside, ids), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_the_answer_does_not_depend_on_padding(kind, run_file):
    workload = build_workload(run_file(kind, **CLASSIFY))
    model = workload.model().eval()
    texts = ["bad", "good number 7 of a list and more and more", "number"]
    with torch.no_grad():
        together = workload.predict(model, workload.encode(texts))["probabilities"]
        alone = [workload.predict(model, workload.encode([text]))["probabilities"][0] for text in texts]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_token_is_predicted_from_those_before_it(kind, run_file):
    workload = build_workload(run_file(kind))
    model = workload.model().eval()
    ids = [[5, 6, 7, 8], [5, 6, 7, 9]]
    found = logits(model, ids)
    torch.testing.assert_close(found[0, :3], found[1, :3], rtol=0, atol=1e-6)
    assert not torch.equal(found[0, 3], found[1, 3])


def test_padding_counts_nothing(run_file):
    workload = build_workload(run_file("llama", **CLASSIFY))
    model, samples, ids = workload.model().eval(), workload.data("train"), np.arange(5)
    (padded,) = samples.fixed_shape_batches([(ids, ids)], 8)
    assert padded.inputs["input_ids"].shape == (8, 24)
    with torch.no_grad():
        total, count = workload.loss(model, samples.batch(ids, ids))
        again, counted = workload.loss(model, padded)
    assert int(count) == int(counted) == 5
    assert float(again) == pytest.approx(float(total), rel=1e-5)


def test_a_classifier_learns_and_tells_classes(run_file, tmp_path):
    import transformers

    averaged = {"train.ema": 0.5}
    spec = run_file("bert", **CLASSIFY, **averaged, **{"train.steps": 40, "train.evaluate_every": 40, "train.lr": 3e-3})
    result = train(spec, tmp_path, show=False)
    assert result.metrics["accuracy"] == 1.0
    found = paceline.open(result.path).predict(TEXTS[:2])
    assert found.labels == ["good", "bad"]
    held_out = [(text, label) for text, label in open_source(spec.data).test()]
    told = paceline.open(result.path).predict([text for text, _ in held_out])
    labels = torch.tensor([label for _, label in held_out])
    losses = torch.nn.functional.cross_entropy(torch.from_numpy(told["logits"]), labels, reduction="none")
    assert losses.double().sum().item() / len(held_out) == result.metrics["loss"], "to the last digit"
    paceline.export(result.path, tmp_path / "out")
    there = transformers.pipeline("text-classification", str(tmp_path / "out"))
    said = there(TEXTS[0])[0]
    assert said["label"] == "good"
    assert said["score"] == pytest.approx(float(found.probabilities[0, 1]), abs=1e-6)


def test_a_bare_model_begins_a_classifier(hf, run_file, tmp_path):
    """The folder of a model without a head: its names lack the first word."""
    import transformers

    whole = transformers.AutoModelForSequenceClassification.from_pretrained(hf / "bert")
    whole.bert.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_bytes((hf / "bert" / "tokenizer.json").read_bytes())
    bare = {"model.init_from": str(tmp_path / "bare"), "train.steps": 1, "train.lr": 1e-9}
    spec = run_file("bert", **CLASSIFY, **bare)
    result = train(spec, tmp_path, show=False)
    weights = result.weights()
    for name, tensor in whole.bert.state_dict().items():
        torch.testing.assert_close(weights[f"bert.{name}"], tensor, rtol=0, atol=1e-6)


def test_dropout_may_be_off(run_file):
    lines = []
    workload = build_workload(run_file("gpt2", **{"model.dropout": False}))
    workload.prepare(lines.append)
    assert any("dropout of the config (" in line and "resid_pdrop=0.1" in line for line in lines), lines
    assert workload.config.resid_pdrop == 0.0
    assert build_workload(run_file("gpt2")).config.resid_pdrop == 0.1


@pytest.mark.parametrize(("change", "said"), CASES["runs"])
def test_bad_input_is_one_line(change, said, run_file, tmp_path):
    with pytest.raises(UserError) as refused:
        train(run_file("llama", **change), tmp_path / "runs", show=False)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_folder_without_safetensors_is_refused(hf, run_file, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((hf / "llama" / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="pickle"):
        train(run_file("llama", **{"model.init_from": str(tmp_path)}), tmp_path / "runs", show=False)


def test_config_alone_draws_weights_and_vocabulary(hf, corpus_cache, tmp_path, ask):
    (tmp_path / "config.json").write_bytes((hf / "llama" / "config.json").read_bytes())
    (tmp_path / "run.yaml").write_text(
        "workload: transformers\nmodel: {config: config.json}\n"
        f"data: {{source: text, path: {hf}/texts.txt, vocab: 280, sequence: 16, cache: {corpus_cache}}}\n"
        "train: {steps: 2, global_batch: 4}\nparallel: {threads: 1}\n"
    )
    answer = ask("train", tmp_path / "run.yaml", "--out", tmp_path / "runs")
    assert answer.code == 0
    assert "learning a vocabulary of 280 tokens" in answer.out
    values = (tmp_path / "config.json").read_text().replace('"vocab_size": 300', '"vocab_size": 299')
    (tmp_path / "config.json").write_text(values)
    spec = load(tmp_path / "run.yaml", {"data.tokenizer": str(hf / "llama" / "tokenizer.json")})
    with pytest.raises(UserError, match="300 tokens"):
        train(spec, tmp_path)


PAGE = Path(__file__).parents[4] / "docs" / "transformers.md"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
RUN_FILES = [yaml.safe_load(text) for text in BLOCKS]


@pytest.mark.parametrize("values", RUN_FILES, ids=[values["name"] for values in RUN_FILES])
def test_run_files_on_the_page_train(values, hf, corpus_cache, tmp_path):
    values["model"]["init_from"] = str(hf / Path(values["model"]["init_from"]).name)
    values["data"] |= {"path": str(hf / values["data"]["path"]), "cache": str(corpus_cache)}
    if "sequence" in values["data"]:
        values["data"]["sequence"] = 64  # as many positions as the models here have
    values["train"]["lr"] = float(values["train"]["lr"])
    result = train(build_spec({**values, "parallel": {"threads": 1}}), tmp_path, show=False)
    assert result.summary.loss_last < result.summary.loss_first


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_are_read_and_exported(kind, run_file, tmp_path):
    import transformers

    folder, ids = hf_models.save(kind, tmp_path / kind), [[5, 9, 12, 7]]
    assert any(re.search(r"experts\.0\.\w+\.weight", name) for name in load_file(folder / "model.safetensors"))
    run = train(run_file(kind, **{"model.init_from": str(folder), "train.lr": 1e-30}), tmp_path, show=False)
    wanted = logits(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), ids)
    torch.testing.assert_close(logits(paceline.open(run.path).model, ids), wanted)
    paceline.export(run.path, tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(exported, ids), wanted)
