"""Dropout by key: the mask of a sample depends on its key, the module and the position, and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.nn.keyed_dropout import PASS, TORCHS, KeyedPasses, mark_sites, mask_and_scale
from paceline.parallel.parallelize import _recompute

KEYS = torch.tensor([11, 7, 123456789, 2**31 - 1, 3, 99])
FIRST, REST = slice(0, 2), slice(2, 6)


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Shared(nn.Module):
    """One module that is called twice in a pass."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.cat([self.drop(x), self.drop(x)], -1)


class Attention(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.weights)[0]


def encoder(batch_first):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=batch_first), 2)


ROWS = {
    "module": (lambda: nn.Sequential(nn.Dropout(0.5)), (5, 3)),
    "channels": (lambda: nn.Sequential(nn.Dropout2d(0.5)), (16, 3, 3)),
    "alpha": (lambda: nn.Sequential(nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)), (16, 4)),
    "functional": (lambda: nn.Sequential(Functional()), (7,)),
    "shared": (lambda: nn.Sequential(Shared()), (9,)),
    "attention": (lambda: nn.Sequential(Attention(False)), (4, 8)),
    "attention with weights": (lambda: nn.Sequential(Attention(True)), (4, 8)),
    "encoder": (lambda: encoder(True), (4, 8)),
}


def build(make):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    mark_sites(model)
    return model, KeyedPasses([model])


def forward(model, passes, x, part=slice(None)):
    with passes.running(KEYS[part]):
        return model(x[part])


@pytest.mark.parametrize("kind", ROWS)
def test_a_mask_follows_its_sample(kind):
    make, shape = ROWS[kind]
    model, passes = build(make)
    x = torch.randn(6, *shape)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole = forward(model, passes, x)
    parts = torch.cat([forward(model, passes, x, part) for part in (FIRST, REST)])
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(whole, parts)
    assert not torch.allclose(whole, model.eval()(x))
    assert F.dropout is TORCHS["dropout"]
    assert not PASS.misfits


def test_samples_may_lie_along_the_second_dimension():
    model, passes = build(lambda: encoder(False))
    x = torch.randn(4, 6, 8)
    with passes.running(KEYS):
        whole = model(x)
    for part in (FIRST, REST):  # the first of 2 samples, which divide the length
        with passes.running(KEYS[part]):
            torch.testing.assert_close(model(x[:, part]), whole[:, part])


def test_sites_calls_and_keys_have_masks_of_their_own():
    model, passes = build(lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), Shared()))
    x, drops = torch.ones(6, 4000), [model[0][0], model[0][1], model[0][2].drop, model[0][2].drop]
    with passes.running(KEYS):
        masks = torch.stack([drop(x) > 0 for drop in drops]).float().flatten(0, 1)
    assert torch.allclose(masks.mean(1), torch.tensor(0.5), atol=0.04)
    assert (torch.corrcoef(masks) - torch.eye(24)).abs().max() < 0.08
    with passes.running(KEYS + 1):
        assert not torch.equal(masks[:6], (drops[0](x) > 0).float())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
def test_what_is_kept_is_scaled(p):
    model, passes = build(lambda: nn.Dropout(p))
    with passes.running(KEYS):
        found = model(torch.ones(6, 20_000))
    assert (found == 0).float().mean() == pytest.approx(p, abs=0.01)
    assert set(found.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p)))} if p < 1 else {0.0}


@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_that_are_computed_again_draw_the_same(how):
    def gradient(recomputed):
        model, passes = build(lambda: nn.Sequential(nn.Linear(8, 8), Shared(), nn.Linear(16, 8)))
        blocks = [model[0], model[0]]
        if recomputed:
            _recompute(blocks[:1], how)
        x = torch.linspace(-1, 1, 48).view(6, 8)
        with passes.running(KEYS):
            loss = model[0](model[0](x)).square().sum()  # the same layers twice
            passes.end_forward()
            loss.backward()
        return model[0][0].weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))


def test_rows_that_are_no_samples_are_named_and_drawn_by_torch():
    model, passes = build(lambda: nn.Sequential(nn.Dropout(0.5)))
    try:
        with passes.running(KEYS):
            assert (model(torch.ones(7, 100)) == 0).any()
        assert PASS.misfits == {"0.0"}
    finally:
        PASS.misfits.clear()


def test_modules_that_drop_nothing_are_left_alone():
    class Config:
        attention_dropout = 0.0

    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_dropout, self.inner, self.dropout = 0.0, nn.Linear(2, 2), nn.Dropout(0.0)

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=self.attention_dropout) + self.dropout(x)

    assert len(build(Quiet)[1].sites) == 1


def test_compiled_layers_draw_the_same_bits():
    model, passes = build(lambda: nn.Sequential(nn.Linear(8, 8), Shared(), nn.Linear(16, 8), nn.Dropout(0.5)))
    x = torch.randn(6, 8)
    eager = [forward(model, passes, x + number) for number in range(2)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=False):
        found = [forward(compiled, passes, x + number) for number in range(2)]
    for ours, theirs in zip(eager, found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", ["scaled_dot_product_attention", "dropout"])
def test_scores_of_attention_are_dropped_the_same_in_texts_padded_to_any_length(way):
    """Ranks pad to the longest of their own texts."""
    _, passes = build(lambda: nn.Linear(1, 1))
    found = []
    for length in (5, 9):
        with passes.running(KEYS):
            if way == "dropout":
                found.append(F.dropout(torch.ones(6, 2, length, length), 0.5)[..., :5, :5])
                continue
            q, v = torch.zeros(6, 2, length, 4), torch.eye(length).expand(6, 2, -1, -1)
            found.append(F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)[..., :5, :5] > 0)
    assert torch.equal(*found)
    assert 0.3 < (found[0] == 0).float().mean() < 0.7


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_only_the_mask_is_kept_and_gradients_are_scaled_as_values(kind):
    x, gradient = torch.randn(2, 40, 30).to(kind).unbind()
    kept, bytes_kept = torch.rand(40, 30) < 0.7, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: bytes_kept.append(t.nbytes) or t, lambda t: t):
        dropped = mask_and_scale(x.requires_grad_(), kept, 1 / 0.7)
    assert bytes_kept == [kept.nbytes]
    (found,) = torch.autograd.grad(dropped, x, gradient)
    assert torch.equal(found, mask_and_scale(gradient, kept, 1 / 0.7))
