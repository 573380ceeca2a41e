"""The classifier, planned: its closed form against the model itself, and what is assumed of its texts."""

import pytest
import torch

from paceline.config import build_spec
from paceline.planner.cost_model import build_cost_model
from paceline.planner.tracing import build_traced_cost_model
from paceline.workloads.classifier.workload import Encoder


def classifier(**model):
    return build_spec({"workload": "classifier", "model": model, "data": {"source": "ag_news", "path": "/nowhere"}})


@pytest.mark.parametrize("model", [{}, {"width": 256, "heads": 8, "layers": 4, "ffn": 1024}])
def test_a_classifier_has_the_parameters_of_its_closed_form(model):
    spec = classifier(**model)
    with torch.device("meta"):
        built = Encoder(spec.model, spec.data.vocab, spec.data.max_length, 4)
    assert build_cost_model(spec).params == sum(p.numel() for p in built.parameters())


def test_frozen_parts_of_a_classifier_have_no_gradients():
    usual = classifier()
    some = usual.replace({"train.groups": {"layers.0.*": {"frozen": True}, "tokens*": {"frozen": True}}})
    with torch.device("meta"):
        named = dict(Encoder(usual.model, usual.data.vocab, usual.data.max_length, 4).named_parameters())
    held = sum(p.numel() for name, p in named.items() if name.startswith(("layers.0.", "tokens")))
    found = build_cost_model(some)
    assert found.trained_params == pytest.approx(found.params - held)
    assert build_cost_model(usual).trained_params == found.params


def test_what_the_data_are_not_there_to_say_is_assumed_and_listed():
    found = build_cost_model(classifier())
    assert (found.samples, found.units_per_sample) == (120_000, 48)
    assert "as in the original AG News" in found.assumptions[0]
    told = build_cost_model(classifier(), samples=1000, tokens=20)
    assert (told.samples, told.units_per_sample, told.steps) == (1000, 20, 8)


def test_the_fullest_batch_is_between_the_mean_and_the_longest():
    found = build_cost_model(classifier())
    lengths = found.lengths
    assert lengths.fullest_batch_ratio(1) > lengths.fullest_batch_ratio(128) > 1
    assert lengths.fullest_batch_ratio(1) <= lengths.longest_ratio


def test_the_measured_shape_of_the_classifier_is_near_its_closed_form(tmp_path):
    rows = [f"{['good ', 'bad ', 'fine ', 'poor '][k % 4] * (6 + k % 9)},{k % 2}" for k in range(120)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    data = {"source": "csv", "path": str(tmp_path / "texts.csv"), "max_length": 48, "vocab": 300}
    data["cache"] = str(tmp_path / "cache")
    spec = build_spec({"workload": "classifier", "model": {"layers": 3}, "data": data, "train": {"steps": 1}})
    fake, closed = build_traced_cost_model(spec), build_cost_model(spec)
    assert fake.params == closed.params
    assert fake.flops_per_sample == pytest.approx(closed.flops_per_sample, rel=0.1)
    kept = [b.saved_split_elements + b.saved_whole_elements for b in (fake.blocks[1], closed.blocks[1])]
    assert kept[0] == pytest.approx(kept[1], rel=0.2)
    assert fake.blocks[1].moved_elements == pytest.approx(closed.blocks[1].moved_elements, rel=0.1)
