"""The language model, planned: its closed form against the model itself."""

import pytest
import torch

from paceline.config import build_spec
from paceline.planner.cost_model import build_cost_model
from paceline.workloads.lm.decoder import Decoder


@pytest.mark.parametrize("preset", ["tiny", "small", "gpt2", "1b", "7b"])
def test_a_language_model_has_the_parameters_of_its_closed_form(preset):
    spec = build_spec({"workload": "lm", "model": {"preset": preset}, "data": {"vocab": 1000, "sequence": 64}})
    sizes = spec.model.shape(1000, 64)
    with torch.device("meta"):
        built = Decoder(sizes)
    assert build_cost_model(spec).params == sum(p.numel() for p in built.parameters()) == sizes.parameters
