"""The decoder: sizes of published models, whole or in stages, and its parts against plain formulas."""

import copy
import math
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from paceline.config import build_spec
from paceline.config.decoder_shape import PRESETS, DecoderShape
from paceline.nn.experts import balance_by_bias, count_choices, summarize_loads
from paceline.planner.cost_model import build_cost_model
from paceline.workloads.lm.decoder import Decoder
from paceline.workloads.lm.sections import LMModel
from paceline.workloads.lm.standalone import ExportedDecoder

KINDS = {
    "modern": {},
    "as many keys": {"kv_heads": 4},
    "one key": {"kv_heads": 1},
    "tied": {"tied": True},
    "gpt2": {"tied": True, "positions": "learned", "ffn_kind": "gelu"},
    "experts": {"experts": 4, "shared_ffn": 8},
}


def shape_of(kind="modern"):
    sizes = {"width": 32, "heads": 4, "kv_heads": 2, "layers": 3, "ffn": 48, **KINDS[kind]}
    return DecoderShape.of("custom", sizes, vocab=50, sequence=16)


def some_tokens():
    ids, targets = torch.randint(0, 50, (2, 9)), torch.randint(0, 50, (2, 9))
    targets[0, 4:] = -100
    return ids, targets


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_logits(kind):
    model = Decoder(shape_of(kind)).double().eval()
    ids, targets = some_tokens()
    losses = model(ids, targets=targets)
    logits = model(ids)
    assert logits.shape == (2, 9, 50)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 9).sum(1)
    torch.testing.assert_close(losses, expected)
    weights = list(model.parameters())
    ours, theirs = (torch.autograd.grad(some.sum(), weights, retain_graph=True) for some in (losses, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert sum(weight.numel() for weight in weights) == model.shape.parameters
    assert not [name for name in model.state_dict() if not name.endswith(("weight", "_proj"))], "no tables of positions"


@pytest.mark.parametrize("kind", ["modern", "as many keys"])
@pytest.mark.parametrize("cut", [1, 2])
def test_stages_one_after_the_other_are_the_whole(kind, cut):
    whole = Decoder(shape_of(kind)).double().eval()
    ids, targets = some_tokens()
    first, last = whole.stage(range(cut)), copy.deepcopy(whole)
    last.tokens = None
    for i in range(cut):
        del last.layers[str(i)]
    hidden = first(ids)
    assert hidden.shape == (2, 9, 32)
    assert torch.equal(last(hidden, targets=targets), whole(ids, targets=targets))
    assert first.state_dict().keys() | last.state_dict().keys() == whole.state_dict().keys()
    assert not first.state_dict().keys() & last.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_their_names_and_the_seed_alone(kind):
    torch.manual_seed(3)
    whole = Decoder(shape_of(kind))
    torch.randn(5)
    with torch.device("meta"):
        empty = Decoder(shape_of(kind))
    later = empty.stage(range(1, 3)).to_empty(device="cpu") if not whole.shape.tied else empty.to_empty(device="cpu")
    later.initialise(seed=3)
    for name, value in later.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    other = Decoder(shape_of(kind))
    other.initialise(seed=4)
    assert not torch.equal(other.tokens.weight, whole.tokens.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_see_what_comes_after_it_and_the_first_loss_is_a_guess(kind):
    ids, targets = torch.randint(0, 50, (8, 16)), torch.randint(0, 50, (8, 16))
    model = Decoder(shape_of(kind)).double().eval()
    assert abs(model(ids, targets=targets).sum().item() / targets.numel() - math.log(50)) < 0.4
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_mixture_is_the_weighted_sum_of_its_experts_alone_and_exported():
    model = Decoder(shape_of("experts")).double().eval()
    mixture, x = model.layers["0"].ffn, torch.randn(2, 9, 32, dtype=torch.double)
    scores, chosen = mixture.router(x).float().softmax(-1).topk(2, -1)
    expected = mixture.shared(x)
    for k in range(2):
        weight = (scores[..., k] / scores.sum(-1)).double()[..., None]
        gate, up = torch.einsum("bsd,bsfd->bsf", x, mixture.experts.gate_up_proj[chosen[..., k]]).chunk(2, -1)
        down = mixture.experts.down_proj[chosen[..., k]]
        expected = expected + weight * torch.einsum("bsf,bsdf->bsd", F.silu(gate) * up, down)
    torch.testing.assert_close(mixture(x)[0], expected)
    alone = ExportedDecoder(asdict(model.shape)).double()
    alone.load_state_dict(model.state_dict())
    ids, _ = some_tokens()
    torch.testing.assert_close(alone(ids), model(ids))


def test_balanced_experts_add_the_least_and_each_sequence_counts_alone():
    model = Decoder(shape_of("experts"), balance=1.0).double()
    ids, targets = some_tokens()
    added = model(ids, targets=targets) - model.eval()(ids, targets=targets)
    assert (added >= 0.9 * (targets >= 0).sum(1)).all()
    model.train()
    one = model(ids[1:], targets=targets[1:])
    torch.testing.assert_close(one, model(ids, targets=targets)[1:])


def test_biases_move_towards_experts_that_had_too_few_tokens_and_are_exported():
    shape = replace(shape_of("experts"), balance_by="bias")
    model = Decoder(shape, balance=1.0)
    ids, targets = some_tokens()
    plain = Decoder(shape_of("experts"))(ids, targets=targets).detach()
    plain -= Decoder(shape_of("experts"), balance=0.0)(ids, targets=targets).detach()
    assert (plain > 0).any(), "a loss balances otherwise"
    model(ids, targets=targets).sum().backward()
    counted = model.expert_load.clone()
    assert counted.sum(1).tolist() == [2 * (targets >= 0).sum()] * 3, "two choices of each token that counts"
    balance_by_bias([model], False, nullcontext())
    torch.testing.assert_close(model.expert_bias, 1 / 4 - counted / counted.sum(1, keepdim=True))
    assert not model.expert_load.any()
    with count_choices([model]) as loads, torch.no_grad():
        model.eval()(ids)
    assert [load.sum() for load in loads.values()] == [2 * ids.numel()] * 3
    assert not model.expert_load.any(), "an evaluation moves nothing"
    told = summarize_loads({name: load.numpy() for name, load in loads.items()})
    assert told["busiest_expert"] == 4 * max(map(max, told["expert_load"])) > 1
    alone = ExportedDecoder(asdict(shape))
    alone.load_state_dict(model.state_dict())
    torch.testing.assert_close(alone(ids), model(ids))


# Published sizes. GPT-2 124M has 124,439,808 parameters; its biases, 102,144 of them, are left out here.
PUBLISHED = {
    "gpt2": 124_439_808 - 102_144,
    "1b": 1_100_048_384,
    "3b": 3_426_473_600,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    spec = build_spec({"workload": "lm", "model": {"preset": preset}, "data": {"vocab": 300, "sequence": 1024}})
    shape = spec.model.shape(vocab=1, sequence=1024)
    with torch.device("meta"):
        model = Decoder(shape)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == shape.parameters == build_cost_model(spec).params == PUBLISHED[preset]


def test_presets_are_those_of_the_run_file_and_given_fields_override_them():
    assert tuple(PRESETS) == LMModel.model_fields["preset"].annotation.__args__
    assert 1.3e9 < LMModel(preset="1.3b").shape(1, 1).parameters < 1.4e9
    shape = LMModel(preset="7b", layers=2, kv_heads=8).shape(vocab=5, sequence=9)
    assert (shape.layers, shape.kv_heads, shape.width, shape.vocab) == (2, 8, 4096, 32000)
    assert LMModel(preset="tiny").shape(vocab=5, sequence=9).vocab == 5
