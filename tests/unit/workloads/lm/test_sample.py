"""The verbs on a trained language model: sample and export."""

import pytest
import torch

import paceline
from paceline.runlog.run_dir import RunDir
from results import expect_error


@pytest.fixture(scope="module")
def run(tiny_lm, tmp_path_factory):
    spec = tiny_lm.replace({"train.steps": 6, "train.checkpoint_every": 3})
    result = paceline.train(spec, tmp_path_factory.mktemp("runs"), show=False)
    assert result.status == "finished"
    assert result.metrics.keys() >= {"loss", "perplexity"}
    return result


def test_a_sample_begins_with_the_prompt_and_follows_the_seed(run):
    texts = [paceline.sample(run.path, "Returns the", tokens=12, seed=seed) for seed in (0, 0, 1)]
    assert all(text.startswith("Returns the") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) > len("Returns the")
    prompt = "a long prompt " * 40
    assert paceline.sample(run.path, prompt, tokens=3).startswith(prompt)


def test_a_low_temperature_takes_the_likeliest_token(run):
    trained = paceline.open(run.path)
    workload, model = trained.workload, trained.model
    ids = torch.tensor([[0, *workload.corpus.tokenizer.encode("The", add_special_tokens=False).ids]])
    likeliest = int(model(ids)[0, -1].argmax())
    expected = "The" + workload.corpus.tokenizer.decode([likeliest])
    for top_k in (0, 1, 40):
        assert paceline.sample(run.path, "The", tokens=1, temperature=1e-6, top_k=top_k) == expected


BAD = [("--temperature", "0"), ("--temperature", "nan"), ("--tokens", "0"), ("--top-k", "-1"), ("--seed", "-1")]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_wrong_requests_end_with_2(run, ask, option, value):
    found = ask("sample", run.path, "a", option, value)
    assert (found.code, found.error.code, found.error.key) == (2, "invalid-value", option)


def test_a_prompt_a_run_and_a_checkpoint_are_needed(run, tiny_lm, tmp_path):
    young = RunDir.claim(tmp_path, "young", tiny_lm).path
    for given, code in (
        ((run.path, ""), "missing-value"),
        (("nowhere", "a"), "not-found"),
        ((young, "a"), "not-found"),
    ):
        with expect_error(code):
            paceline.sample(*given)
