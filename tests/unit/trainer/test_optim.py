"""Schedules, scaling, update rules: against their formulas, and through steps that are passed over."""

import math

import pytest
import torch
from torch import nn

from paceline.config import ParameterGroup, Train
from paceline.parallel.parallelize import ParallelModel
from paceline.parallel.parameters import ParameterGroups, collect_local_parameters, find_ends
from paceline.parallel.precision import Scaler
from paceline.trainer.optim.optimizers import build_update_groups, set_lr
from paceline.trainer.optim.schedule import build_schedule, scale_lr
from paceline.trainer.optim.small_adam import choose_block
from paceline.trainer.step.step import State, update_weights

RULES = ["adamw", "adam", "sgd", "lars", "lamb", "muon"]


@pytest.mark.parametrize(
    ("shape", "rates"),
    [
        ("constant", {0: 0.0, 50: 0.5, 100: 1.0, 1000: 1.0}),
        ("linear", {100: 1.0, 550: 0.55, 1000: 0.1}),
        ("cosine", {100: 1.0, 325: 0.55 + 0.45 * math.cos(math.pi / 4), 550: 0.55, 1000: 0.1, 5000: 0.1}),
    ],
)
def test_schedules_are_functions_of_samples(shape, rates):
    schedule = build_schedule(Train(lr=1.0, schedule=shape, warmup=0.1, final_lr=0.1), 1000)
    assert {seen: schedule(seen) for seen in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("how", "rates"),
    [
        ({"warmup_steps": 4}, [0, 0.25, 0.5, 0.75, 1, 1]),
        ({"warmup_steps": 4, "warmup_from": 0.2}, [0.2, 0.4, 0.6, 0.8, 1, 1]),
        ({"warmup_steps": 4, "warmup_shape": "log"}, [0, 0.5, math.log(3) / math.log(4), 1, 1, 1]),
        ({"warmup_steps": 0}, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_warm_up_in_steps_of_a_length_a_start_and_a_shape(how, rates):
    schedule = build_schedule(Train(lr=1.0, schedule="constant", global_batch=10, **how), 1000)
    assert [schedule(10 * step) for step in range(6)] == pytest.approx(rates)


@pytest.mark.parametrize(("rule", "decay"), [("sgd", "matrices"), ("adamw", "all")])
def test_what_decays(rule, decay):
    """Without a gradient, only the decay moves a weight."""
    state, train = state_of(rule, weight_decay=0.5, decay=decay, momentum=0.9, eps=1e-5)
    before = [p.detach().clone() for p in state.model.net.parameters()]
    apply(state, train, [torch.zeros(3, 4), torch.zeros(3)])
    moved = [not torch.equal(a, b) for a, b in zip(before, state.model.net.parameters(), strict=True)]
    assert moved == [True, decay == "all"]
    group = state.optimizer.param_groups[0]
    assert group.get("eps", 1e-5) == 1e-5


@pytest.mark.parametrize(("rule", "want"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_grows_with_the_batch(rule, want):
    lr, equation = scale_lr(Train(lr=0.1, lr_scaling=rule, global_batch=512, base_batch=128))
    assert lr == pytest.approx(want)
    assert equation.startswith(f"{want:g} peak lr = 0.1")
    assert ("512" in equation) == (rule != "none")


def state_of(rule, **changes):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    train = Train(optimizer=rule, clip=0.0, **changes)
    whole = ParallelModel(model, [model], collect_local_parameters([model], 1), parameters=15)
    state = State.new(whole, train, torch.device("cpu"))
    set_lr(state.optimizer, 0.1)
    return state, train


def apply(state, train, gradients, loss=1.0):
    for p, g in zip(state.model.net.parameters(), gradients, strict=True):
        p.grad = g.clone()
    found = torch.tensor([loss, 1.0], dtype=torch.float64)
    return update_weights(state, train, 1, found, state.model.local_parameters.sum_squared_gradients())


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)]


def by_hand(rule, weights, steps, decay, lr=0.1, momentum=0.9, beta1=0.9, beta2=0.999):
    """The published update of each rule, in float64, one tensor at a time."""
    weights = [w.double() for w in weights]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for t, grads in enumerate(steps, 1):
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            g, wd, matrix = g.double(), decay if w.ndim > 1 else 0.0, w.ndim > 1
            if rule == "lars":
                u = g + wd * w
                first[i] = momentum * first[i] + lr * (0.001 * w.norm() / u.norm() if matrix else 1) * u
                weights[i] = w - first[i]
                continue
            if rule == "adam":
                g = g + wd * w
            first[i], second[i] = beta1 * first[i] + (1 - beta1) * g, beta2 * second[i] + (1 - beta2) * g * g
            m, v = first[i] / (1 - beta1**t), second[i] / (1 - beta2**t)
            if rule in ("adamw", "adam"):
                weights[i] = w * (1 - lr * wd * (rule == "adamw")) - lr * m / (v.sqrt() + 1e-8)
            else:
                u = m / (v.sqrt() + 1e-6) + wd * w
                weights[i] = w - lr * (w.norm() / u.norm() if matrix else 1) * u
    return weights


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", ["adamw", "adam", "lars", "lamb"])
def test_rules_follow_their_formulas(rule, decay):
    state, train = state_of(rule, weight_decay=decay)
    before = [p.detach().clone() for p in state.model.net.parameters()]
    steps = [gradients(seed) for seed in range(5)]
    for step in steps:
        apply(state, train, step)
    for got, want in zip(state.model.net.parameters(), by_hand(rule, before, steps, decay), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_muon_moves_matrices_as_torchs_does():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 9, bias=False), nn.Linear(6, 9, bias=False)
    theirs.load_state_dict(ours.state_dict())
    train = Train(optimizer="muon", clip=0.0, momentum=0.95, weight_decay=0.1, precision="bf16")
    whole = ParallelModel(ours, [ours], collect_local_parameters([ours], 1), parameters=54)
    state = State.new(whole, train, torch.device("cpu"))
    set_lr(state.optimizer, 0.1)
    torchs = torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in range(5):
        drawn = torch.randn(9, 6, generator=torch.Generator().manual_seed(seed))
        apply(state, train, [drawn])
        theirs.weight.grad = drawn
        torchs.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0.02, atol=0.01)


def test_muon_leaves_embeddings_and_the_last_matrix_to_adamw():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    groups = ParameterGroups(ends=find_ends(model))
    local = collect_local_parameters([model], 1)
    made = build_update_groups(Train(optimizer="muon"), local, groups)
    assert [p.shape for group in made if group["adapt"] for p in group["params"]] == [(4, 4)]


def small_steps(kept, weights, seed=0, steps=60, shape=(64, 64)):
    """(weights of SmallAdam, weights of torch's Adam) after so many steps on the same gradients."""
    torch.manual_seed(0)
    model = nn.Linear(*shape, bias=False)
    exact = nn.Linear(*shape, bias=False)
    exact.load_state_dict(model.state_dict())
    model.weight.data = model.weight.data.to(torch.bfloat16 if weights == "bf16" else torch.float32)
    train = Train(optimizer_state=kept, weights=weights, precision="bf16", clip=0.0, seed=seed)
    whole = ParallelModel(model, [model], collect_local_parameters([model], 1), parameters=4096)
    state = State.new(whole, train, torch.device("cpu"))
    set_lr(state.optimizer, 1e-4)
    torchs = torch.optim.AdamW(exact.parameters(), lr=1e-4)
    for step in range(steps):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(step)).add(0.3)
        apply(state, train, [drawn.to(model.weight.dtype)])
        exact.weight.grad = drawn
        torchs.step()
    return model.weight.detach().float(), exact.weight.detach(), state


@pytest.mark.parametrize(
    ("kept", "weights", "near"), [("8bit", "fp32", 0.1), ("bf16", "bf16", 0.05), ("fp32", "bf16", 0.05)]
)
def test_smaller_states_stay_near_and_do_not_drift(kept, weights, near):
    """An update of 1e-4 is far below half of what separates neighbours in bf16: rounding to the nearest never moves."""
    found, exact, _ = small_steps(kept, weights)
    torch.manual_seed(0)
    moved = exact - nn.Linear(64, 64, bias=False).weight.detach()
    assert abs(float((found - exact).mean() / moved.mean())) < near


def test_a_random_number_belongs_to_seed_step_and_place():
    first, again, other = (small_steps("8bit", "bf16", seed, steps=3)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_eight_bits_take_eight_bits():
    _, _, state = small_steps("8bit", "bf16", steps=1)
    bytes_kept = sum(t.nbytes for t in state.optimizer.state[state.model.local_parameters[0].data].values())
    assert 2 * 4096 < bytes_kept <= 2 * 4096 * (1 + 4 / 8) + 4


@pytest.mark.parametrize(("tail", "block"), [(4096, 256), (576, 72), (11008, 172), (50257, 29 * 1), (64, 8), (3, 3)])
def test_blocks_divide_a_row_and_its_parts(tail, block):
    assert choose_block(tail) == block
    assert tail % block == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_not_finite_changes_nothing(rule):
    state, train = state_of(rule)
    bad = [torch.full((3, 4), math.inf), torch.zeros(3)]
    clean, _ = state_of(rule)
    for step in (bad, gradients(0), bad, gradients(1)):
        norm = apply(state, train, step)
        if step is bad:
            assert not torch.isfinite(norm)
        else:
            apply(clean, train, step)
    apply(state, train, gradients(2), loss=math.nan)
    assert state.tensors()["optim"].keys() == clean.tensors()["optim"].keys()
    for kind, tensors in clean.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state.tensors()[kind][name]), name


@pytest.mark.parametrize("rule", RULES)
def test_clipping_cuts_the_global_norm(rule):
    state, _ = state_of(rule)
    train = Train(optimizer=rule, clip=0.5)
    other, _ = state_of(rule)
    step = gradients(3)
    norm = torch.cat([g.flatten() for g in step]).norm()
    assert apply(state, train, step) == pytest.approx(float(norm))
    apply(other, Train(optimizer=rule, clip=0.0), [g * 0.5 / norm for g in step])
    for a, b in zip(state.model.net.parameters(), other.model.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_scale_of_fp16_halves_on_overflow_and_doubles_after_a_while():
    scaler = Scaler(Train(precision="fp16", loss_scale_window=3), torch.device("cpu"))
    first = float(scaler.scale)
    good, bad = torch.tensor(True), torch.tensor(False)
    for updates, scale in (([bad], first / 2), ([good] * 3, first), ([good, good, bad, good, good], first / 2)):
        for finite in updates:  # an overflow starts the count anew
            scaler.update(finite)
        assert float(scaler.scale) == scale
    for stays, train in ((1, Train(precision="bf16")), (128, Train(precision="fp16", loss_scale=128))):
        scaler = Scaler(train, torch.device("cpu"))
        scaler.update(bad)
        assert float(scaler.scale) == stays


def test_state_is_complete_before_the_first_step_and_untouched_by_it():
    state, _ = state_of("adamw")
    torch.manual_seed(0)
    torch.testing.assert_close(list(state.model.net.parameters()), list(nn.Linear(4, 3).parameters()), rtol=0, atol=0)
    names = {f"{p}.{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}
    assert set(state.tensors()["optim"]) == names
    assert all(float(t.abs().sum()) == 0 for t in state.tensors()["optim"].values())


@pytest.mark.parametrize("rule", ["sgd", "lars"])
def test_each_number_of_a_gradient_can_be_cut(rule):
    state, train = state_of(rule, momentum=0.0, weight_decay=0.0, clip_value=0.3)
    bias = state.model.net.bias.detach().clone()
    apply(state, train, [torch.full((3, 4), 2.0), torch.tensor([-2.0, 0.1, 0.5])])
    assert torch.allclose(state.model.net.bias, bias - 0.1 * torch.tensor([-0.3, 0.1, 0.3]))


def test_groups_have_their_own_rate_and_decay():
    model = nn.Linear(4, 3)
    table = {"weight": ParameterGroup(lr=0.5, weight_decay=0.25)}
    whole = ParallelModel(model, [model], collect_local_parameters([model], 1), 15, groups=ParameterGroups(table))
    state = State.new(whole, Train(optimizer="sgd", lr=1.0), torch.device("cpu"))
    state.before_step(0.1)
    groups = {group["params"][0].ndim: group for group in state.optimizer.param_groups}
    rates = {ndim: (float(group["lr"]), group["weight_decay"]) for ndim, group in groups.items()}
    assert rates == {1: (pytest.approx(0.1), 0.0), 2: (pytest.approx(0.05), 0.25)}


def test_the_average_forgets_its_first_weights_and_steps_that_were_not_applied():
    state, train = state_of("sgd", ema=0.9)
    model = state.model.net
    wanted = model.weight.detach().clone()
    for step, loss in enumerate([1.0, math.nan, 1.0]):
        state.before_step(0.1)
        apply(state, train, gradients(step), loss)
        state.step += 1
        share = 1 - min(0.9, (1 + step) / (10 + step))
        wanted = wanted if math.isnan(loss) else wanted + share * (model.weight.detach() - wanted)
    raw = model.weight.detach().clone()
    with state.for_evaluation():
        assert torch.allclose(model.weight, wanted)
    assert torch.equal(model.weight, raw)
