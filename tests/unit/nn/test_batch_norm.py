"""Batch norm over groups: statistics of fixed samples, whatever is computed in one pass."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.prefetch import split_groups
from paceline.nn.batch_norm import divide_into_groups, group_batch_norms, list_batch_norms, update_running_statistics
from paceline.nn.keyed_dropout import KeyedPasses


def build(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.Flatten(), nn.BatchNorm1d(36))


def train(model, x, parts, steps=2):
    """Make the passes over parts of the samples; return the outputs in their order."""
    norms, passes = list_batch_norms([model]), KeyedPasses([model])
    for _ in range(steps):
        found = []
        for part in parts:
            with passes.running(torch.from_numpy(part)):
                found.append(model(x[part]))
        update_running_statistics(norms, several=False)
    return torch.cat(found)[np.argsort(np.concatenate(parts))]


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("samples", [16, 19, 17])
def test_passes_do_not_matter(options, samples):
    x, reference = torch.randn(samples, 3, 5, 5), None
    for shares in (1, 2, 4):
        model = build(**options)
        names = list(model.state_dict())
        group_batch_norms(model, 4)
        found = train(model, x, split_groups(np.ones(samples), shares, 4))
        assert list(model.state_dict()) == names
        state = [*model.state_dict().values(), found]
        reference = reference or state
        for ours, theirs in zip(reference, state, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_one_group_is_torchs_batch_norm_and_evaluation_has_the_same_bits():
    x, model, plain = torch.randn(8, 3, 5, 5), build(), build()
    group_batch_norms(model, 8)
    expected = [plain(x) for _ in range(2)][-1]
    torch.testing.assert_close(train(model, x, [np.arange(8)]), expected)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_samples_without_weight_do_not_move_running_statistics():
    model = build()
    group_batch_norms(model, 4)
    with KeyedPasses([model]).running(torch.arange(4), counted=False):
        model(torch.randn(4, 3, 5, 5))
    assert not any(norm.found for norm in list_batch_norms([model]))


def test_memory_stays_channels_last():
    model = nn.Sequential(nn.BatchNorm2d(4))
    group_batch_norms(model, 2)
    x = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    assert train(model, x, [np.arange(6)], 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("samples", "sizes"), [(8, [4, 4]), (11, [4, 4, 3]), (9, [4, 5]), (1, [1]), (3, [3]), (5, [5])]
)
def test_no_group_is_a_single_sample_beside_others(samples, sizes):
    assert divide_into_groups(samples, 4) == sizes


def test_groups_stay_together_and_every_sample_counts_once():
    cost = np.random.default_rng(0).integers(1, 9, 45)
    shares = split_groups(cost, 4, 4)
    assert sorted(np.concatenate(shares)) == list(range(45))
    assert [len(share) for share in shares] == [12, 12, 12, 9] or sorted(map(len, shares)) == [8, 12, 12, 13]
    for share in shares:
        sizes = divide_into_groups(len(share), 4)
        firsts = share[np.cumsum([0, *sizes[:-1]])]
        assert not (firsts % 4).any()


def test_compiled_groups_are_the_same():
    x, parts, states = torch.randn(8, 3, 5, 5), [np.arange(4), np.arange(4, 8)], []
    for compiled in (False, True):
        model = build()
        group_batch_norms(model, 2)
        if compiled:
            model[1].compile(backend="aot_eager", fullgraph=True)
        states.append([*model.state_dict().values(), train(model, x, parts)])
    torch.testing.assert_close(*states)


def test_compiled_groups_keep_what_torch_keeps():
    """The input in its own type: a copy in fp32 of each would double the memory of a network."""
    x, kept = torch.randn(16, 4, 6, 6, dtype=torch.bfloat16, requires_grad=True), []
    for grouped in (False, True):
        norm, sizes = nn.Sequential(nn.BatchNorm2d(4)), []
        if grouped:
            group_batch_norms(norm, 4)
        compiled = torch.compile(norm, backend="aot_eager_decomp_partition", fullgraph=True)
        with (
            KeyedPasses([norm]).running(torch.arange(16)),
            torch.autograd.graph.saved_tensors_hooks(lambda t, into=sizes: into.append(t.nbytes), lambda t: t),
        ):
            compiled(x)
        kept.append(sum(size for size in sizes if size >= x.nbytes))
    assert kept == [x.nbytes, x.nbytes]
