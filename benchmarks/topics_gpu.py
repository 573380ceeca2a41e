"""Topic models on one CUDA device: time of a pass, of the start and of the whole fit, against the usual AdamW loop.

    PYTHONPATH=src python benchmarks/topics_gpu.py [--only accuracy,pass,fit,sparse,race,rival,sweep] [--seconds 90]

All data are generated on the device. One line per result, as soon as it is there. Each section is independent, and no
section starts a new item after its --seconds. `sweep` compares tile sizes, and is run only when named.
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/topics_gpu.py --tiny     runs every line on a CPU, as a test
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import statistics
import time
import traceback

import numpy as np
import torch

from paceline.topics import device as passes
from paceline.topics.device import DensePass, SparsePass
from paceline.topics.engine import Fit, Stop
from paceline.topics.start_ls import least_squares_start

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET") else "cpu")
BEGIN = time.perf_counter()
SPARSE_START = {"smoothing": 10.0, "mix": 0.05}


def say(text):
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median_ms(work, times=20):
    work()
    taken = []
    for _ in range(times):
        if DEVICE.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


class Clock:
    """The seconds of one section."""

    def __init__(self, seconds):
        self.end = time.perf_counter() + seconds

    def over(self):
        return time.perf_counter() > self.end


# ---- problems -------------------------------------------------------------------------------------------------------


def simplex(rows, columns, random):
    shares = torch.empty(rows, columns, device=DEVICE).exponential_(generator=random)
    return shares / shares.sum(1, keepdim=True)


class Dense:
    """Counts of documents of about `length` words: padded uint8 on the device, and the factors they come from."""

    def __init__(self, n, m, k, length, seed=42):
        random = torch.Generator(device=DEVICE).manual_seed(seed)
        self.n, self.m, self.k = n, m, k
        self.L, F = simplex(n, k, random), simplex(k, m, random)
        self.Ft = F.T.contiguous()
        self.X = torch.zeros(passes.padded(n), passes.padded(m), dtype=torch.uint8, device=DEVICE)
        self.per_document = torch.zeros(n, dtype=torch.float64, device=DEVICE)
        self.per_term = torch.zeros(m, dtype=torch.float64, device=DEVICE)
        largest = 0.0
        for rows in torch.arange(n, device=DEVICE).split(max(1, 200_000_000 // m)):
            x = torch.poisson(length * (self.L[rows] @ F), generator=random)
            largest = max(largest, float(x.max()))
            self.X[rows[0] : rows[-1] + 1, :m] = x.clamp_(max=255).to(torch.uint8)
            self.per_document[rows] = x.sum(1).double()
            self.per_term += x.sum(0, dtype=torch.float64)
        share = self.per_term + 0.5
        self.share = (share / share.sum()).float()
        say(f"{n:,} x {m:,}, k = {k}, {length:,} words per document, largest count {largest:.0f} (255 at most)")

    def step(self, tile=None):
        return DensePass(self.X, self.per_document, self.share, tile)

    def exact_loss(self, L, Ft):
        """float32 products, float64 sums: sum of -x log p."""
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for first in range(0, self.n, 2048):
            last = min(self.n, first + 2048)
            p = (L[first:last] @ Ft.T).clamp_min_(1e-30)
            total -= (self.X[first:last, : self.m].float() * p.log_()).sum(dtype=torch.float64)
        return float(total)


class Sparse:
    """Short documents with few topics each, terms after Zipf's law: rows of nonzeros on the device."""

    def __init__(self, n, m, k, length, seed=0):
        random, numbers = torch.Generator(device=DEVICE).manual_seed(seed), np.random.default_rng(seed)
        self.n, self.m, self.k = n, m, k
        base = 1 / (np.arange(m) + 2.7) ** 1.05
        F = np.maximum(numbers.gamma(np.maximum(0.05 * m * base / base.sum(), 1e-3)[None].repeat(k, 0)), 1e-12)
        F /= F.sum(1, keepdims=True)
        self.Ft = torch.from_numpy(F.T.copy()).float().to(DEVICE)
        reached = torch.from_numpy(F.cumsum(1)).to(DEVICE)
        kinds = torch.from_numpy(numbers.dirichlet(np.full(k, 0.1), size=min(n, 50_000))).float().to(DEVICE)
        mixture = kinds[torch.randint(len(kinds), (n,), device=DEVICE, generator=random)].cumsum(1)
        words = torch.randn(n, device=DEVICE, generator=random).mul_(0.8).add_(math.log(length) - 0.32).exp_()
        words = words.clamp_(20, 5000).long()
        keys, values = [], []
        for documents in torch.arange(n, device=DEVICE).split(250_000):
            document = torch.repeat_interleave(documents, words[documents])
            drawn = torch.rand(len(document), device=DEVICE, generator=random)
            topic = torch.zeros_like(document)
            for a in range(k - 1):
                topic += drawn > mixture[document, a]
            term = torch.empty_like(document)
            for a in range(k):
                here = (topic == a).nonzero().squeeze(1)
                drawn = torch.rand(len(here), device=DEVICE, dtype=torch.float64, generator=random) * reached[a, -1]
                term[here] = torch.searchsorted(reached[a].contiguous(), drawn).clamp_(max=m - 1)
            key, value = torch.unique(document * m + term, return_counts=True)
            keys.append(key)
            values.append(value.clamp_(max=255).to(torch.uint8))
        key, count = torch.cat(keys), torch.cat(values)
        document = key // m
        pointer = torch.zeros(n + 1, dtype=torch.int64, device=DEVICE)
        pointer[1:] = torch.bincount(document, minlength=n).cumsum(0)
        self.csr = (pointer, (key - document * m).to(torch.int32), count)
        self.per_document = torch.zeros(n, dtype=torch.float64, device=DEVICE).index_add_(0, document, count.double())
        self.per_term = torch.zeros(m, dtype=torch.float64, device=DEVICE)
        self.per_term.index_add_(0, self.csr[1], count.double())
        share = self.per_term + 0.5
        self.share = (share / share.sum()).float()
        say(f"{n:,} x {m:,}, k = {k}, {len(key) / n:.0f} nonzeros per document, {len(key) / 1e6:,.1f} M in all")

    def step(self, by_terms=False):
        return SparsePass(self.csr, self.per_document.float(), self.share, by_terms=by_terms)


def random_factors(problem, seed=7):
    random = torch.Generator(device=DEVICE).manual_seed(seed)
    L = torch.rand(problem.n, problem.k, device=DEVICE, generator=random) + 0.05
    Ft = torch.rand(problem.m, problem.k, device=DEVICE, generator=random).add_(0.05) * problem.share[:, None]
    return L / L.sum(1, keepdim=True), Ft / Ft.sum(0)


def recovery(true, found):
    """Cosine of each true topic with the one assigned to it: mean and least."""
    unit = torch.nn.functional.normalize
    cosines = (unit(true, dim=0).T @ unit(found, dim=0)).cpu().numpy()
    if importlib.util.find_spec("scipy"):
        from scipy.optimize import linear_sum_assignment

        chosen = cosines[linear_sum_assignment(-cosines)]
    else:  # the best pair first
        chosen = []
        for _ in range(len(cosines)):
            a, b = np.unravel_index(cosines.argmax(), cosines.shape)
            chosen.append(cosines[a, b])
            cosines[a], cosines[:, b] = -2, -2
    return float(np.mean(chosen)), float(np.min(chosen))


def ppm(loss, true_loss):
    return f"{(loss - true_loss) / abs(true_loss) * 1e6:+.2f} ppm"


def start(problem, step, **options):
    if problem.n < 1000:
        options = {**options, "sample_turns": 2, "turns": 2}
    return least_squares_start(
        step.multiply, step.multiply_t, problem.n, problem.m, problem.k, problem.per_document, problem.per_term,
        seed=1, device=DEVICE, **options,
    )  # fmt: skip


def fit(step, L, Ft, *, passes, target=-math.inf, begin=None, rows="em"):
    """Passes until the loss (without the constant n) is at `target`. L, Ft, and (seconds, loss) for each pass: the loss
    is that of the point which the pass began with."""
    begin = time.perf_counter() if begin is None else begin
    running = Fit(lambda: [(0, len(L), step)], L.clone(), Ft.clone(), Stop(passes=passes), rows=rows)
    trace = []
    while len(trace) < passes and not (trace and trace[-1][1] <= target):
        loss = running.step().loss - len(L)
        trace.append((time.perf_counter() - begin, loss))
    return *running.result(), trace


# ---- sections -------------------------------------------------------------------------------------------------------


def accuracy(clock, tiny):
    """Statistics and loss of one pass, and the loss reached, against float64 in plain torch."""
    for k in (5,) if tiny else (20, 64, 128, 256, 512):
        problem = Dense(*((48, 300) if tiny else (1500, 2100)), k, 3000, seed=k)
        L, Ft = random_factors(problem)
        X = problem.X[: problem.n, : problem.m].double()
        P = L.double() @ Ft.double().T
        S_true, loss_true = (X / P).T @ L.double(), -float((X * P.log()).sum())
        G = L.double() * ((X / P) @ Ft.double())
        S, new = torch.zeros_like(Ft), L.clone()
        value = float(problem.step()(new, Ft, S, rows="em"))
        G /= G.sum(1, keepdim=True)
        of_S = float((S - S_true).norm() / S_true.norm())
        of_L = float((new - G).norm() / G.norm())
        say(f"accuracy k={k}: S {of_S:.1e}, L {of_L:.1e} (limit 1e-3), loss {abs(value / loss_true - 1):.1e}")
        if k <= 64:
            here, there = (L, Ft), (L.double(), Ft.double())
            for _ in range(3 if tiny else 60):
                new_L, S = here[0].clone(), torch.zeros_like(Ft)
                problem.step()(new_L, here[1], S, rows="em", loss=False)
                new_F = here[1] * S
                here = (new_L, new_F / new_F.sum(0))
                R = X / (there[0] @ there[1].T)
                new_L, new_F = there[0] * (R @ there[1]), there[1] * (R.T @ there[0])
                there = (new_L / new_L.sum(1, keepdim=True), new_F / new_F.sum(0))
            losses = [-float((X * (a.double() @ b.double().T).log()).sum()) for a, b in (here, there)]
            say(f"accuracy k={k}: loss reached after the same passes {losses[0] / losses[1] - 1:+.1e} (limit 1e-6)")


BIG = {}


def big(tiny):
    if not BIG:
        BIG["problem"] = Dense(*((96, 300, 4, 3000) if tiny else (100_000, 100_000, 20, 65_536)))
    return BIG["problem"]


def one_pass(clock, tiny):
    from paceline.topics import triton_calls as calls

    problem = big(tiny)
    L, Ft = random_factors(problem)
    S = torch.zeros_like(Ft)
    step, times = problem.step(), 2 if tiny else 20
    plain_tile = calls.dense_tile(problem.X, problem.k)
    for bulk in (False, True):
        step.tile = dataclasses.replace(plain_tile, bulk=bulk)
        try:
            without = median_ms(lambda: step(L.clone(), Ft, S, rows="em", loss=False), times)
            with_loss = median_ms(lambda: step(L.clone(), Ft, S, rows="em"), times)
            how = "the copy engine" if bulk else "atomics"
            say(f"pass, sums by {how}: {without:.2f} ms, with loss {with_loss:.2f} ms")
        except Exception as failure:
            say(f"pass, bulk={bulk}: failed, {str(failure)[:300]!r}")
    B = torch.randn(problem.m, problem.k + 10, device=DEVICE)
    C = torch.randn(problem.n, problem.k + 10, device=DEVICE)
    say(f"product X @ B {median_ms(lambda: step.multiply(B), times):.2f} ms, "
        f"X.T @ C {median_ms(lambda: step.multiply_t(C), times):.2f} ms")  # fmt: skip
    wait()
    begin = time.perf_counter()
    _ = problem.step().of_shares
    wait()
    say(f"once for each matrix: constant of the loss {1e3 * (time.perf_counter() - begin):.0f} ms")


def whole_fit(clock, tiny):
    problem = big(tiny)
    true_loss = problem.exact_loss(problem.L, problem.Ft)
    for name in ("first, kernels compiled in it", "second", "third"):
        wait()
        begin = time.perf_counter()
        step = problem.step()
        L, Ft = start(problem, step)
        wait()
        of_start = time.perf_counter() - begin
        L, Ft, trace = fit(step, L, Ft, passes=4 if tiny else 100, target=true_loss, begin=begin)
        seconds = time.perf_counter() - begin
        mean, least = recovery(problem.Ft, Ft)
        exact = problem.exact_loss(L, Ft)
        say(f"fit ({name}): start {of_start:.3f} s, {len(trace)} passes, {seconds:.3f} s in all")
        say(f"  against the true parameters {ppm(exact, true_loss)}, cosine {mean:.5f}, least {least:.5f}")
        if clock.over():
            return
    for options in ({"turns": 40}, {"turns": 200}, {"powers": 1}, {"sample": 1 << 30, "turns": 100}):
        if clock.over():
            return
        wait()
        begin = time.perf_counter()
        L, Ft = start(problem, step, **options)
        wait()
        seconds = time.perf_counter() - begin
        excess = ppm(problem.exact_loss(L, Ft), true_loss)
        say(f"start {options}: {seconds:.3f} s, {excess}, cosine {recovery(problem.Ft, Ft)}")
    L, Ft, trace = fit(step, L, Ft, passes=4 if tiny else 60)
    each_ms = 1e3 * trace[-1][0] / len(trace)
    say(f"fit to the end: {len(trace)} passes, {each_ms:.1f} ms each with the loss and all of the loop")
    say(f"  against the true parameters {ppm(trace[-1][1], true_loss)}, cosine {recovery(problem.Ft, Ft)}")


def sparse(clock, tiny):
    BIG.clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    problem = Sparse(*((30, 200, 4, 60) if tiny else (1_000_000, 100_000, 20, 160)))
    times = 1 if tiny else 10
    L, Ft = random_factors(problem)
    S = torch.zeros_like(Ft)
    for by_terms in (False, True):
        step = problem.step(by_terms)
        name = "statistic from the order of the terms" if by_terms else "statistic by atomics in the row pass"
        for rows in ("em", "newton"):
            taken = median_ms(lambda: step(L.clone(), Ft, S, rows=rows, loss=False), times)  # noqa: B023
            with_loss = median_ms(lambda: step(L.clone(), Ft, S, rows=rows), times)  # noqa: B023
            say(f"sparse {rows} pass, {name}: {taken:.2f} ms, with loss {with_loss:.2f} ms")
    del step
    step = problem.step()
    for name in ("first", "second"):
        wait()
        begin = time.perf_counter()
        L, Ft = start(problem, step, **SPARSE_START)
        wait()
        say(f"sparse start ({name}): {time.perf_counter() - begin:.3f} s, cosine {recovery(problem.Ft, Ft)}")
    random_L, random_Ft = random_factors(problem)
    for label, first_L, first_Ft, rows, count in (
        ("least squares, em", L, Ft, "em", 10),
        ("least squares, newton", L, Ft, "newton", 5),
        ("random, newton", random_L, random_Ft, "newton", 40),
    ):
        if clock.over():
            return
        begin = time.perf_counter()
        _, found, trace = fit(step, first_L, first_Ft, passes=2 if tiny else count, rows=rows)
        say(f"sparse fit from {label}: {len(trace)} passes {time.perf_counter() - begin:.3f} s, "
            f"loss {trace[0][1]:.0f} -> {trace[-1][1]:.0f}, cosine {recovery(problem.Ft, found)}")  # fmt: skip


def sweep(clock, tiny):
    """Tile sizes of the dense pass, and sizes of the sparse ones; the best belong into triton_calls.py."""
    from paceline.topics import triton_calls as calls

    problem = big(tiny)
    L, Ft = random_factors(problem)
    S = torch.zeros_like(Ft)
    tiles = [
        calls.Tile(own, other, warps, stages, bulk)
        for own, other, warps in (
            (64, 128, 4),
            (128, 128, 4),
            (128, 128, 8),
            (128, 256, 8),
            (256, 128, 8),
            (64, 256, 4),
        )
        for bulk in (False, True)
        for stages in (2, 3, 4)
    ]
    best = []

    def try_out(some):
        for tile in some[: 2 if tiny else None]:
            if clock.over():
                return
            try:
                step = problem.step(tile)
                times = 1 if tiny else 5
                taken = median_ms(lambda: step(L.clone(), Ft, S, rows="em", loss=False), times)  # noqa: B023
                with_loss = median_ms(lambda: step(L.clone(), Ft, S, rows="em"), times)  # noqa: B023
                best.append((with_loss, tile))
                say(f"sweep {taken:7.2f} ms, with loss {with_loss:7.2f} ms  {tile}")
            except Exception as failure:
                say(f"sweep  failed     {tile}: {str(failure)[:120]!r}")
        best.sort(key=lambda pair: pair[0])

    try_out(tiles)
    try_out([dataclasses.replace(best[0][1], stagger=stagger) for stagger in (0, 1, 7, 101)])
    as_it_was = calls.PROGRAMS
    for programs in (1, 528, 2112):  # 1: no split
        calls.PROGRAMS = programs
        say(f"with at least {programs} programs:")
        try_out([best[0][1]])
    calls.PROGRAMS = as_it_was
    for taken, tile in best[:5]:
        say(f"sweep best {taken:.2f} ms with loss  {tile}")


def sweep_sparse(clock, tiny):
    from paceline.topics import triton_calls as calls

    problem = Sparse(*((20, 200, 4, 60) if tiny else (1_000_000, 100_000, 20, 160)))
    L, Ft = random_factors(problem)
    S = torch.zeros_like(Ft)
    for newton in (False, True):
        for nonzeros, warps in ((32, 1), (64, 1), (64, 2), (128, 2), (128, 4))[: 1 if tiny else None]:
            if newton:
                calls.NEWTON_NONZEROS, calls.NEWTON_WARPS = nonzeros, warps
            else:
                calls.SPARSE_NONZEROS, calls.SPARSE_WARPS = nonzeros, warps
            rows = "newton" if newton else "em"
            step = problem.step()
            taken = median_ms(lambda: step(L.clone(), Ft, S, rows=rows, loss=False), 1 if tiny else 5)  # noqa: B023
            say(f"sweep sparse {rows}: {nonzeros} nonzeros, {warps} warps: {taken:.2f} ms")


def adamw_step(n, m, k):
    """The usual loop of this model: softmax factors, minibatches of 16 documents, AdamW."""
    torch.manual_seed(0)
    L = torch.empty(n, k, device=DEVICE).uniform_(0, 0.1).requires_grad_()
    F = torch.empty(k, m, device=DEVICE).uniform_(0, 0.1).requires_grad_()
    optimizer = torch.optim.AdamW([L, F], lr=0.05, weight_decay=1e-5, fused=DEVICE.type == "cuda")

    def step(X, rows, rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        p = torch.softmax(L[rows], 1) @ torch.softmax(F, 1)
        (p - X[rows, :m].float() * p.clamp_min(1e-10).log()).sum().backward()
        optimizer.step()

    return step, lambda: (torch.softmax(L.detach(), 1), torch.softmax(F.detach(), 1).T.contiguous())


def rival(clock, tiny):
    """Step time of the AdamW loop on the large problem, and of tinytopics itself where it is installed."""
    problem = big(tiny)
    step, _ = adamw_step(problem.n, problem.m, problem.k)
    rows = torch.randint(problem.n, (16,), device=DEVICE)
    taken = median_ms(lambda: step(problem.X, rows, 0.05), 2 if tiny else 30)
    epoch_s = taken * problem.n / 16e3
    say(f"AdamW loop, counts on the device: {taken:.2f} ms for 16 documents, {epoch_s:.1f} s for an epoch")
    if importlib.util.find_spec("tinytopics") is None:
        say("tinytopics itself: skipped, it is not installed here")
        return
    from tinytopics.fit import fit_model

    some = problem.X[:2000, : problem.m].float()
    fit_model(some[:32], problem.k, num_epochs=1, device=DEVICE)
    wait()
    begin = time.perf_counter()
    fit_model(some, problem.k, num_epochs=1, device=DEVICE)
    wait()
    seconds = (time.perf_counter() - begin) * problem.n / len(some)
    say(f"tinytopics on the first {len(some):,} documents: {seconds:.1f} s for an epoch of all of them")


def race(clock, tiny):
    """10k x 10k: the AdamW loop against ours, same counts, same loss in float64."""
    problem = Dense(*((64, 300, 4, 2000) if tiny else (10_000, 10_000, 20, 65_536)), seed=11)
    for _ in range(2):  # the second is warm
        wait()
        begin = time.perf_counter()
        step = problem.step()
        L, Ft = start(problem, step)
        L, Ft, trace = fit(step, L, Ft, passes=3 if tiny else 40, begin=begin)
    (first_s, first_loss), (last_s, last_loss) = trace[0], trace[-1]
    say(f"race, ours: {first_s:.3f} s to the first loss {first_loss:.0f}, {last_s:.3f} s to {last_loss:.0f}")
    exact, true_loss = problem.exact_loss(L, Ft), problem.exact_loss(problem.L, problem.Ft)
    say(f"  exact {exact:.0f}, at the true parameters {true_loss:.0f}, cosine {recovery(problem.Ft, Ft)}")
    adamw, factors = adamw_step(problem.n, problem.m, problem.k)
    batches, begin, spent = problem.n // 16, time.perf_counter(), 0.0
    for epoch in range(2 if tiny else 200):
        order = torch.randperm(problem.n, device=DEVICE)
        for batch in range(batches):
            phase = ((epoch + batch / batches) % 20) / 20
            adamw(problem.X, order[16 * batch : 16 * batch + 16], 0.01 + 0.02 * (1 + math.cos(math.pi * phase)))
        wait()
        spent += time.perf_counter() - begin
        if epoch in (0, 4, 19, 59, 99, 199) or clock.over():
            loss = problem.exact_loss(*factors())
            ours = next((seconds for seconds, value in trace if value <= loss), None)
            ratio = f"{spent / ours:,.0f}x" if ours else "never reached"
            say(
                f"race, AdamW: epoch {epoch + 1}, {spent:.1f} s, loss {loss:.0f}; ours below it after {ours} s: {ratio}"
            )
        begin = time.perf_counter()
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
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    say(f"{where}, torch {torch.__version__}, kernels: {passes.triton_runs_on(DEVICE)}")
    for name in chosen:
        say(f"--- {name}")
        try:
            SECTIONS[name](Clock(arguments.seconds), arguments.tiny)
        except Exception:
            traceback.print_exc()
    say("done")


if __name__ == "__main__":
    main()
