"""Topic models on one CUDA device: time of a pass, of the start and of the whole fit, against the usual AdamW loop.

    PYTHONPATH=src python benchmarks/topics_gpu.py [--only accuracy,pass,fit,sparse,race,rival,sweep] [--seconds 90]

All data are drawn on the device and handed to `paceline.topics.fit` there. One line per result, as soon as it is there.
Kernels are compiled in a small fit before anything is timed; what that takes is said. No section starts a new item
after its --seconds. `sweep` and `sweep_sparse` compare sizes of tiles, and run only when named.
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/topics_gpu.py --tiny     runs every line on a CPU, as a test
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
import traceback
from functools import partial

import torch
from synthetic_counts import exact_loss
from topics_gpu_problems import DEVICE, Dense, Lean, Sparse, median_ms, random_factors, recovery, say, their_epoch, wait

import paceline.topics as pt
from gpu import device_name
from paceline.workloads.topics.counts.arrays import from_tensor
from paceline.workloads.topics.fitting.passes import can_run_triton
from paceline.workloads.topics.fitting.problem import build_problem
from paceline.workloads.topics.fitting.tiers import sum_counts


class Clock:
    """The seconds of one section."""

    def __init__(self, seconds):
        self.end = time.perf_counter() + seconds

    def over(self):
        return time.perf_counter() > self.end


BIG = {}


def big(tiny):
    if not BIG:
        BIG["problem"] = Dense(*((96, 300, 4, 3000) if tiny else (100_000, 100_000, 20, 65_536)))
    return BIG["problem"]


def exact(problem, L, Ft):
    return exact_loss(counts_of(problem), L.cpu().numpy(), Ft.T.cpu().numpy())


def counts_of(problem):
    """What is given to `fit`: the tensor; on the CPU, which is no device of its own, the counts that it becomes."""
    return problem.X if DEVICE.type == "cuda" else from_tensor(problem.X)


def step_of(problem, tile=None):
    """The pass over all documents, and the shares of the terms."""
    made = build_problem(from_tensor(problem.X))
    _, _, step = next(iter(made.documents()))
    step.tile = tile
    return step, made.share


def watched_fit(problem, passes, **options):
    """A fit, and for each pass when it was over, the loss it began with, and the topics it ended with."""
    trace, topics = [], []

    def watch(fit, turn):
        trace.append((time.perf_counter() - begin, turn.loss, turn.accepted))
        topics.append(fit.result()[1].clone())

    counts = counts_of(problem)
    wait()
    begin = time.perf_counter()
    if can_run_triton("cpu"):  # the interpreter takes minutes for the other starts
        options["start"] = "random"
    model = pt.fit(counts, k=problem.k, passes=passes, progress=watch, **options)
    return model, trace, topics, time.perf_counter() - begin


def compile_first(sections, tiny):
    """A small fit of each kind: kernels are compiled there, and not in what is timed."""
    shape = (40, 260, 4, 300) if tiny else (2048, 2048, 20, 2000)
    kinds = (Dense, Sparse) if {"sparse", "sweep_sparse"} & set(sections) else (Dense,)
    for kind in kinds:
        small = kind(*shape)
        begin = time.perf_counter()
        watched_fit(small, 3)
        taken = time.perf_counter() - begin
        say(f"first fit of this kind ({kind.__name__.lower()}), kernels compiled in it: {taken:.1f} s")


# ---- sections -------------------------------------------------------------------------------------------------------


def accuracy(clock, tiny):
    """Statistics and loss of one pass, and the loss reached, against float64 in plain torch."""
    for k in (5,) if tiny else (20, 64, 128, 256, 512):
        if clock.over():
            return
        problem = Dense(*((48, 300) if tiny else (1500, 2100)), k, 3000, seed=k)
        step, share = step_of(problem)
        L, Ft = random_factors(problem, share)
        X = problem.X.double()
        P = L.double() @ Ft.double().T
        S_true, loss_true = (X / P).T @ L.double(), -float((X * P.log()).sum())
        G = L.double() * ((X / P) @ Ft.double())
        G /= G.sum(1, keepdim=True)
        S, new = torch.zeros_like(Ft), L.clone()
        value = float(step(new, Ft, S))
        of_S, of_L = (float((a - b).norm() / b.norm()) for a, b in ((S, S_true), (new, G)))
        say(f"accuracy k={k}: S {of_S:.1e}, L {of_L:.1e} (limit 1e-3), loss {abs(value / loss_true - 1):.1e}")
        if k > 64:
            continue
        here, there = (L, Ft), (L.double(), Ft.double())
        for _ in range(3 if tiny else 60):
            new_L, S = here[0].clone(), torch.zeros_like(Ft)
            step(new_L, here[1], S, loss=False)
            new_F = here[1] * S
            here = (new_L, new_F / new_F.sum(0))
            R = X / (there[0] @ there[1].T)
            new_L, new_F = there[0] * (R @ there[1]), there[1] * (R.T @ there[0])
            there = (new_L / new_L.sum(1, keepdim=True), new_F / new_F.sum(0))
        losses = [-float((X * (a.double() @ b.double().T).log()).sum()) for a, b in (here, there)]
        said = float(step(here[0].clone(), here[1], S))
        say(f"accuracy k={k}: loss reached after the same passes {losses[0] / losses[1] - 1:+.1e} (limit 1e-6), "
            f"as the pass says it {said / losses[0] - 1:+.1e}")  # fmt: skip


def one_pass(clock, tiny):
    problem = big(tiny)
    step, share = step_of(problem)
    L, Ft = random_factors(problem, share)
    S, times = torch.zeros_like(Ft), 2 if tiny else 20
    without = median_ms(lambda: step(L.clone(), Ft, S, loss=False), times)
    with_loss = median_ms(lambda: step(L.clone(), Ft, S), times)
    say(f"pass: {without:.2f} ms, with loss {with_loss:.2f} ms")
    S.zero_()
    new = L.clone()
    step(new, Ft, S, loss=False)
    some, rows = slice(0, 64), slice(0, 256)
    of_S = (problem.X[:, some].double() / (L.double() @ Ft[some].double().T)).T @ L.double()
    of_L = L[rows].double() * ((problem.X[rows].double() / (L[rows].double() @ Ft.double().T)) @ Ft.double())
    of_L /= of_L.sum(1, keepdim=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in ((S[some], of_S), (new[rows], of_L))]
    say(f"  against float64: S {errors[0]:.1e}, L {errors[1]:.1e} (64 terms, 256 documents)")
    B, C = (torch.randn(size, problem.k + 10, device=DEVICE) for size in (problem.m, problem.n))
    say(f"product X @ B {median_ms(lambda: step.multiply(B), times):.2f} ms, "
        f"X.T @ C {median_ms(lambda: step.multiply_t(C), times):.2f} ms")  # fmt: skip
    counts = from_tensor(problem.X)
    say(f"once for each fit: sums of all counts {median_ms(lambda: sum_counts(counts), 2):.1f} ms")


def whole_fit(clock, tiny):
    problem = big(tiny)
    true_loss = exact(problem, problem.L, problem.Ft)
    for name in ("first", "second", "third"):
        model, trace, topics, seconds = watched_fit(problem, 4 if tiny else 200)
        hit = next((at for at, (_, loss, _) in enumerate(trace) if loss <= true_loss), None)
        below = "never" if hit is None else f"{trace[hit][0]:.3f} s ({hit + 1} passes)"
        at_hit = recovery(problem.Ft, topics[-1 if hit is None else hit])
        each_ms = 1e3 * (trace[-1][0] - trace[0][0]) / max(1, len(trace) - 1)
        say(f"fit ({name}): first pass over after {trace[0][0]:.3f} s, below the true loss after {below}, "
            f"cosine {at_hit[0]:.5f}, least {at_hit[1]:.5f}")  # fmt: skip
        excess = (model.loss - true_loss) / abs(true_loss) * 1e6
        found = recovery(problem.Ft, torch.from_numpy(model.F.T.copy()).to(DEVICE))
        say(f"  to the end: {seconds:.3f} s, {model.passes} passes of {each_ms:.2f} ms ({model.stopped_because}), "
            f"{excess:+.2f} ppm of the true loss, cosine {found[0]:.5f}, least {found[1]:.5f}")  # fmt: skip
        if clock.over():
            return
    said = exact(problem, torch.from_numpy(model.L), torch.from_numpy(model.F.T))
    say(f"  loss as the fit says it {model.loss / said - 1:+.1e} of that in float64")


def sparse(clock, tiny):
    BIG.clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    problem = Sparse(*((30, 200, 4, 60) if tiny else (1_000_000, 100_000, 20, 160)))
    times = 1 if tiny else 10
    step, share = step_of(problem)
    L, Ft = random_factors(problem, share)
    S = torch.zeros_like(Ft)
    begin = time.perf_counter()
    _ = step.by_terms
    wait()
    say(f"once for each fit: nonzeros in the order of the terms, {time.perf_counter() - begin:.3f} s")
    taken = median_ms(lambda: step(L.clone(), Ft, S, loss=False), times)
    with_loss = median_ms(lambda: step(L.clone(), Ft, S), times)
    say(f"sparse pass: {taken:.2f} ms, with loss {with_loss:.2f} ms")
    for name in ("first", "second"):
        if clock.over():
            return
        model, trace, topics, seconds = watched_fit(problem, 2 if tiny else 60)
        cosines = [recovery(problem.Ft, Ft)[0] for Ft in topics]
        hit = next((at for at, value in enumerate(cosines) if value >= 0.99), None)
        reached = "never" if hit is None else f"after {trace[hit][0]:.3f} s ({hit + 1} passes)"
        say(f"sparse fit ({name}): first pass over after {trace[0][0]:.3f} s, cosine 0.99 {reached}, "
            f"{model.passes} passes {seconds:.3f} s, cosine {cosines[-1]:.5f}, loss {model.loss:.0f}")  # fmt: skip


def sweep(clock, tiny):
    """Tile sizes of the dense pass; the best belong into triton_passes.py."""
    from paceline.workloads.topics.fitting import triton_passes as calls

    problem = big(tiny)
    step, share = step_of(problem)
    L, Ft = random_factors(problem, share)
    S, best = torch.zeros_like(Ft), []
    shapes = ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8), (64, 256, 4))
    tiles = [calls.Tile(*shape, stages) for shape in shapes for stages in (2, 3, 4)]

    def try_out(some):
        for tile in some[: 2 if tiny else None]:
            if clock.over():
                return
            step.tile = tile
            try:
                taken = median_ms(lambda: step(L.clone(), Ft, S, loss=False), 1 if tiny else 5)
                best.append((taken, tile))
                say(f"sweep {taken:7.2f} ms  {tile}")
            except Exception as failure:
                say(f"sweep  failed     {tile}: {str(failure)[:120]!r}")
        best.sort(key=lambda pair: pair[0])

    try_out(tiles)
    try_out([dataclasses.replace(best[0][1], stagger=stagger) for stagger in (0, 1, 7, 101)])


def sweep_sparse(clock, tiny):
    from paceline.workloads.topics.fitting import triton_passes as calls

    problem = Sparse(*((20, 200, 4, 60) if tiny else (1_000_000, 100_000, 20, 160)))
    step, share = step_of(problem)
    L, Ft = random_factors(problem, share)
    table = calls.make_full_operand(Ft / share[:, None].clamp_min(1e-30))
    sums = torch.zeros_like(table)
    for nonzeros, warps in ((16, 1), (32, 1), (32, 2), (64, 1), (64, 2), (128, 4))[: 1 if tiny else None]:
        for kind in ("ROW", "TERM"):
            setattr(calls, f"{kind}_NONZEROS", nonzeros)
            setattr(calls, f"{kind}_WARPS", warps)
        taken = median_ms(partial(calls.update_sparse, step.csr, L.clone(), table, loss=False), 1 if tiny else 5)
        say(f"sweep sparse, rows: {nonzeros} nonzeros, {warps} warps: {taken:.2f} ms")
        taken = median_ms(partial(calls.add_sparse_statistic, step.by_terms, L, table, sums), 1 if tiny else 5)
        say(f"sweep sparse, terms: {nonzeros} nonzeros, {warps} warps: {taken:.2f} ms")


def rival(clock, tiny):
    """An epoch of the rival's own loop on the large problem, from one of its first documents."""
    problem = big(tiny)
    some = problem.X[: 64 if tiny else 2000].float()
    say(f"rival, counts on the device: {their_epoch(some, problem.n, problem.k):.2f} s for an epoch")


def race(clock, tiny):
    """10k x 10k: 200 epochs of the rival against ours, same counts, same loss in float64."""
    problem = Dense(*((64, 300, 4, 2000) if tiny else (10_000, 10_000, 20, 65_536)), seed=11)
    for _ in range(3):  # the last is warm
        model, trace, _, seconds = watched_fit(problem, 3 if tiny else 200)
    true_loss = exact(problem, problem.L, problem.Ft)
    found = recovery(problem.Ft, torch.from_numpy(model.F.T.copy()).to(DEVICE))
    say(f"race, ours: first pass over after {trace[0][0]:.3f} s, {model.passes} passes in {seconds:.3f} s, loss "
        f"{model.loss:.0f}, at the true parameters {true_loss:.0f}, cosine {found[0]:.5f}")  # fmt: skip
    slow = their_epoch(problem.X[: 64 if tiny else 2000].float(), problem.n, problem.k)
    say(f"race, rival: its own loop takes {slow:.2f} s for an epoch, {200 * slow:.0f} s for 200")
    lean, spent = Lean(problem.X, problem.k), 0.0
    for epoch in range(2 if tiny else 200):
        wait()
        begin = time.perf_counter()
        lean.epoch(epoch)
        wait()
        spent += time.perf_counter() - begin
        if epoch in (0, 4, 19, 59, 99, 139, 179, 199) or clock.over():
            L, F = lean.factors()
            loss = exact(problem, L, F.T)
            ours = next((seconds for seconds, value, _ in trace if value <= loss), math.inf)
            own = slow * (epoch + 1)
            say(f"race, rival: epoch {epoch + 1}, loss {loss:.0f}; ours below it after {ours:.4f} s; its own loop "
                f"{own:.1f} s: {own / ours:,.0f}x, recorded {spent:.1f} s: {spent / ours:,.0f}x")  # fmt: skip
        if clock.over():
            say("race: the time of this section is over; give more --seconds for all 200 epochs")
            return


SECTIONS = {
    "accuracy": accuracy,
    "pass": one_pass,
    "fit": whole_fit,
    "sweep": sweep,
    "rival": rival,
    "sparse": sparse,
    "sweep_sparse": sweep_sparse,
    "race": race,
}
WHEN_NAMED = ("sweep", "sweep_sparse")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="sections, with commas: " + ",".join(SECTIONS))
    arguments.add_argument("--seconds", type=float, default=90.0, help="of one section")
    arguments.add_argument("--tiny", action="store_true")
    arguments = arguments.parse_args()
    chosen = [name for name in arguments.only.split(",") if name]
    if set(chosen) - set(SECTIONS):
        raise SystemExit(f"--only {arguments.only}: the sections are {', '.join(SECTIONS)}")
    chosen = chosen or [name for name in SECTIONS if arguments.tiny or name not in WHEN_NAMED]
    where = "CPU" if arguments.tiny and DEVICE.type == "cpu" else device_name()
    say(f"{where}, torch {torch.__version__}, kernels: {can_run_triton(DEVICE)}")
    compile_first(chosen, arguments.tiny)
    for name in chosen:
        say(f"--- {name}")
        try:
            SECTIONS[name](Clock(arguments.seconds), arguments.tiny)
        except Exception:
            traceback.print_exc()
    say("done")


if __name__ == "__main__":
    main()
