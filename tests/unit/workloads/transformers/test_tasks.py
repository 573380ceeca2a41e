"""Every task beside language models and classifiers of texts: trained, planned, predicted, exported; or rejected."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml

import hf_models
import paceline
from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload
from paceline.workloads.transformers.samples import MaskedWindows, MaskRule
from paceline.workloads.transformers.sections import TASKS

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
ROWS = {
    "t5": "seq2seq_lm",
    "bart": "seq2seq_lm",
    "bert": "masked_lm",
    "roberta": "token_classification",
    "vit": "image_classification",
}


@pytest.fixture(scope="module")
def make_spec(tmp_path_factory, corpus_cache):
    """The run file of a model that the library saved for its task."""
    folder = tmp_path_factory.mktemp("tasks")
    data = hf_models.write_task_data(folder / "data")

    def make(kind, task="", **overrides):
        task = task or ROWS[kind]
        if not (folder / kind).exists():
            hf_models.save(kind, folder / kind, TASKS[task].auto)
        values = {
            "name": kind,
            "workload": "transformers",
            "model": {"init_from": str(folder / kind), "task": task, "match": "some"},
            "data": {**data[task], "cache": str(corpus_cache)},
            "train": {"steps": 30, "global_batch": 8, "lr": 1e-2, "log_every": 1},
            "parallel": {"threads": 1},
        }
        return build_spec(values).replace(overrides)

    return make


@pytest.fixture(scope="module", params=ROWS)
def run(request, make_spec, tmp_path_factory):
    return train(make_spec(request.param), tmp_path_factory.mktemp("runs"), show=False)


def test_train_predict_export(run, tmp_path, ask):
    assert run.summary.loss_last < 0.8 * run.summary.loss_first
    assert paceline.plan(RunDir(run.path).spec(), "1xA10").cost_model.params == run.summary.parameters
    weights = next(read_events(RunDir(run.path).events_file(0), "start"))["weights"]
    assert weights["left"] == []
    assert [name for name in weights["drawn"] if "classifier" not in name] == [], "files may have older names"
    trained = paceline.open(run.path)
    section, texts = trained.workload.section, ["good number 3 of the list", "bad number 7 of the list"]
    if section.task == "image_classification":
        folder = trained.workload.texts.path
        texts = [folder / "dark" / "2.png", folder / "light" / "3.png"]
        assert trained.predict(texts).labels == ["dark", "light"]
        assert ask("predict", run.path, *texts).code == 0
    elif section.task == "token_classification":
        assert trained.predict(texts)["tags"].tolist() == ["ADJ O NUM O O O"] * 2
    elif section.task == "masked_lm":
        found = trained.predict(["good [MASK] 3 of the list"])
        assert found["filled"][0].endswith("3 of the list")
        assert 0 < found["sure"][0] <= 1
    paceline.export(run.path, tmp_path / "out")
    auto = getattr(transformers, TASKS[section.task].auto)
    inputs = dict(trained.workload.encode(texts).inputs)
    theirs = auto.from_pretrained(tmp_path / "out").eval()
    if section.task == "seq2seq_lm":
        written = theirs.generate(**inputs, max_new_tokens=24, num_beams=1, do_sample=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer.batch_decode(written, skip_special_tokens=True) == trained.predict(texts)["text"].tolist()
        inputs["decoder_input_ids"] = torch.tensor([[0, 5, 6], [0, 7, 8]])
    with torch.no_grad():
        assert torch.equal(trained.model(**inputs).logits, theirs(**inputs).logits)
    processor = tmp_path / "out" / "preprocessor_config.json"
    if processor.exists():
        pixels = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", use_fast=False)
        from PIL import Image

        theirs = pixels([Image.open(file) for file in texts], return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(inputs["pixel_values"], theirs, atol=2e-2, rtol=0)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_loss_of_a_pair_is_that_of_the_library(kind, make_spec):
    spec = make_spec(kind)
    workload = build_workload(spec)
    batch = workload.data("train").batch(np.arange(5), np.arange(5))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(spec.model.init_from).eval()
    plain = {name: value for name, value in batch.inputs.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        total, count = workload.loss(theirs, batch)
        loss = theirs(**plain, labels=batch.labels).loss
    assert float(total / count) == pytest.approx(float(loss), rel=1e-5)


def test_masks_follow_the_key_of_a_sample():
    ids = np.random.default_rng(0).integers(5, 90, 4001)
    ids[::50] = 3
    samples = MaskedWindows(ids, 100, MaskRule(0.15, mask=4, special=3, vocab=90))
    numbers, keys = np.arange(40), np.arange(40) * 7919
    whole = samples.batch(numbers, keys)
    alone = samples.batch(numbers[7:8], keys[7:8])
    assert alone.labels[0].equal(whole.labels[7])
    assert alone.inputs["input_ids"][0].equal(whole.inputs["input_ids"][7])
    assert not samples.batch(numbers, keys + 1).labels.equal(whole.labels)
    counted = whole.labels >= 0
    tokens, original = whole.inputs["input_ids"], torch.from_numpy(ids[:4000].reshape(40, 100))
    assert whole.labels[counted].equal(original[counted])
    assert tokens[~counted].equal(original[~counted])
    assert not (original[counted] == 3).any()
    assert counted.float().mean() == pytest.approx(0.15 * 0.98, abs=0.02)
    shares = [(tokens[counted] == 4).float().mean(), (tokens[counted] == original[counted]).float().mean()]
    assert [float(share) for share in shares] == pytest.approx([0.8, 0.1], abs=0.05)


@pytest.mark.parametrize(("kind", "change", "key"), CASES["tasks"])
def test_what_does_not_fit_is_one_line(kind, change, key, make_spec, tmp_path):
    pairs = make_spec("t5").data.path
    change = {name: str(pairs) if value == "PAIRS" else value for name, value in change.items()}
    with pytest.raises(UserError) as error:
        train(make_spec(kind, **change), tmp_path, show=False)
    assert error.value.key == key
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_masked_lm_needs_a_mask_token(make_spec, tmp_path):
    spec = make_spec("bert")
    folder = spec.model.init_from
    text = (folder / "tokenizer.json").read_text().replace("[MASK]", "[NONE]")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError) as error:
        build_workload(spec.replace({"data.tokenizer": str(tmp_path / "tokenizer.json")})).prepare(print)
    assert error.value.key == "data.tokenizer"


@pytest.mark.parametrize(("kind", "allowed"), CASES["allowed"])
def test_plan_names_possible_tasks(kind, allowed, tmp_path, ask):
    file = tmp_path / "config.json"
    file.write_text(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    command = ("plan", "--hf", file, "--cluster", "1xH100")
    answer = ask(*command)
    assert answer.code == 2
    assert f"'{kind}'" in answer.err
    assert [task for task in TASKS if task != "causal_lm" and f"model.task={task}" in answer.err] == [*allowed]
    if allowed:
        assert ask(*command, f"model.task={allowed[0]}").code == 0
