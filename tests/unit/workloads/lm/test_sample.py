"""The verbs on a trained language model: sample and export."""

import pytest

import paceline
from paceline.runlog.run_dir import RunDir
from paceline.workloads.lm.decoder import compute_next_logits


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
    import torch

    trained = paceline.open(run.path)
    workload, model = trained.workload, trained.model
    ids = torch.tensor([[0, *workload.corpus.tokenizer.encode("The", add_special_tokens=False).ids]])
    likeliest = int(compute_next_logits(model, ids).argmax())
    expected = "The" + workload.corpus.tokenizer.decode([likeliest])
    for top_k in (0, 1, 40):
        assert paceline.sample(run.path, "The", tokens=1, temperature=1e-6, top_k=top_k) == expected
    torch.testing.assert_close(compute_next_logits(model, ids), model(ids)[0, -1].double(), rtol=1e-5, atol=1e-6)


def test_export_has_the_weights_of_the_decoder(run, tmp_path):
    from safetensors.torch import load_file

    out = paceline.export(run.path, tmp_path / "lm.safetensors")
    model = paceline.open(run.path).model
    tensors = load_file(out)
    assert tensors.keys() == model.state_dict().keys()
    assert all(tensors[name].equal(value) for name, value in model.state_dict().items())


BAD = {
    "empty prompt": (["RUN", ""], "the prompt is empty"),
    "temperature": (["RUN", "a", "--temperature", "0"], "--temperature 0: use"),
    "not a number": (["RUN", "a", "--temperature", "nan"], "--temperature nan"),
    "tokens": (["RUN", "a", "--tokens", "0"], "--tokens 0: use 1 or more"),
    "top-k": (["RUN", "a", "--top-k", "-1"], "--top-k -1"),
    "seed": (["RUN", "a", "--seed", "-1"], "--seed -1"),
    "no run": (["nowhere", "a"], "does not exist"),
}


@pytest.mark.parametrize("row", BAD)
def test_wrong_requests_end_with_2(run, ask, row):
    words, said = BAD[row]
    found = ask("sample", *(run.path if word == "RUN" else word for word in words))
    assert found.code == 2
    assert said in found.err


def test_runs_of_another_workload_or_without_a_checkpoint_are_refused(small, tiny_lm, tmp_path):
    for name, spec, said in (("small", small, "whole checkpoint"), ("young", tiny_lm, "whole checkpoint")):
        with pytest.raises(paceline.UserError, match=said):
            paceline.sample(RunDir.claim(tmp_path, name, spec).path, "a")
