"""A start by least squares: topics of a compressed, weighted matrix, found before the first pass.

Y = counts / document length / sqrt(term share) has noise of about equal size everywhere, so least squares on it is
close to maximum likelihood. A randomised range finder writes Y as Q B^T with a few more columns than topics; that is
all that X is read for. Nonnegative factors of the pair are then found by coordinate descent (HALS), the first turns
on a sample of documents and terms, the last ones on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import UserError
from paceline.workloads.topics.device import triton_runs_on

Tensor = Any  # torch.Tensor; torch is not typed here
Product = Callable[[Tensor], Tensor]
TINY = 1e-20
CARRY_SWEEPS = 20
RECORDED_FROM = 8  # turns
PARTS = 64  # long sums on a device are cut into so many: else a few of its processors do all the work


def least_squares_start(
    multiply: Product,
    multiply_t: Product,
    n: int,
    m: int,
    k: int,
    per_document: Tensor,
    per_term: Tensor,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    anchors: bool = True,
    extra: int = 10,
    powers: int = 2,
    sample: int = 16384,
    sample_turns: int = 100,
    turns: int = 100,
    sweeps: int = 2,
    smoothing: float = 0.5,
    mix: float = 0.02,
) -> tuple[Tensor, Tensor]:
    """L (n, k) and F transposed (m, k), rows of L and columns of F transposed on the simplex and positive.

    `multiply(B)` is X @ B and `multiply_t(C)` is X.T @ C. `anchors`: topics begin at extreme documents, right where
    documents are long; else at random. `smoothing` counts are added to each term: more of them give rare terms less
    weight. `mix` of the average is left in each row, so that no share is zero.
    """
    if k > min(n, m):
        raise UserError(f"{k} topics of {n} documents and {m} terms: give at most {min(n, m)}, as in -k {min(n, m)}")
    random = torch.Generator(device=device).manual_seed(seed)
    length = torch.as_tensor(per_document, device=device).float()
    share = torch.as_tensor(per_term, device=device).float() + smoothing
    share = share / share.sum()
    root_share = share.sqrt()
    weight = (length / length.mean()).sqrt()  # of a document: long ones are known better
    to_row = torch.where(length > 0, weight / length.clamp_min(TINY), torch.zeros_like(length))

    def forward(B: Tensor) -> Tensor:  # Y @ B
        return multiply(B / root_share[:, None]) * to_row[:, None]

    def backward(C: Tensor) -> Tensor:  # Y.T @ C
        return multiply_t(C * to_row[:, None]) / root_share[:, None]

    rank = min(k + extra, n, m)
    Q = forward(torch.randn(m, rank, device=device, generator=random))
    for _ in range(powers):
        Q = forward(orthonormal(backward(orthonormal(Q))))
    Q = orthonormal(Q)
    B = backward(Q)  # Y is about Q B^T

    W = torch.rand(k, n, device=device, generator=random) * weight  # documents: L^T, each times its weight
    if anchors:
        G = (B @ extreme_rows(Q, B, weight, length, k)).clamp_min(0).T + 1e-3 * B.abs().mean()
    else:
        G = torch.rand(k, m, device=device, generator=random) * root_share
    documents, terms = side(Q.T, W), side(B.T, G)
    if sample < max(n, m):
        some = [torch.randperm(size, device=device, generator=random)[:sample] for size in (n, m)]
        few_documents, few_terms = side(Q[some[0]].T, W[:, some[0]]), side(B[some[1]].T, G[:, some[1]])
        hals(few_documents, few_terms, k, sample_turns, sweeps)
        nonnegative(few_documents, terms, k, CARRY_SWEEPS)  # what the sample found, carried over to all
        nonnegative(terms, documents, k, CARRY_SWEEPS)
    else:
        turns += sample_turns
    hals(documents, terms, k, turns, sweeps)
    nonnegative(terms, documents, k, sweeps)

    F = terms[-k:, :m] * root_share
    size = F.sum(1).clamp_min(TINY)
    Ft = (F / size[:, None]).T * (1 - mix) + mix * share[:, None]
    L = (documents[-k:, :n] / weight.clamp_min(TINY) * size[:, None]).T + TINY
    L = L / L.sum(1, keepdim=True) * (1 - mix) + mix / k
    return L.contiguous(), (Ft / Ft.sum(0)).contiguous()


def orthonormal(A: Tensor) -> Tensor:
    """A basis of the columns of a tall matrix, through its Gram matrix: one product, and a small problem for the CPU.

    Columns without content of their own become zero: this is a basis to search in, no factorisation.
    """
    double = A.double()
    sizes, axes = torch.linalg.eigh((double.T @ double).cpu())
    scale = torch.where(sizes > 1e-12 * sizes[-1], sizes.clamp_min(1e-300).rsqrt(), torch.zeros_like(sizes))
    return A @ (axes * scale).to(A)


def extreme_rows(Q: Tensor, B: Tensor, weight: Tensor, length: Tensor, k: int) -> Tensor:
    """Coordinates (rank, k) of k documents that are far from each other: one by one the one farthest from those before.

    Short documents, below half the median length, are left out: noise makes them extreme.
    """
    rows = Q / weight.clamp_min(TINY)[:, None] * (length >= 0.5 * length.median())[:, None]
    double = B.double()
    sizes, axes = torch.linalg.eigh((double.T @ double).cpu())
    rest = rows @ (axes * sizes.clamp_min(0).sqrt())[:, -k:].to(rows)  # the k main axes of the rows of Q B^T
    chosen = []
    for _ in range(k):
        norms = rest.square().sum(1)
        at = norms.argmax().reshape(1)
        chosen.append(at)
        direction = rest[at] / norms[at].sqrt().clamp_min(TINY)[:, None]
        rest = rest - (rest @ direction.T) * direction
    return rows[torch.cat(chosen)].T


def side(basis: Tensor, factor: Tensor) -> Tensor:
    """One side of the pair as one matrix: its basis (rank, size) above its factor (k, size). Columns of zeros are added
    up to a multiple of PARTS; they stay zero."""
    both = torch.cat([basis, factor])
    return torch.nn.functional.pad(both, (0, -both.shape[1] % PARTS)).contiguous()


def hals(documents: Tensor, terms: Tensor, k: int, turns: int, sweeps: int) -> None:
    """Both factors in turn, in place."""

    def turn() -> None:
        nonnegative(terms, documents, k, sweeps)
        nonnegative(documents, terms, k, sweeps)

    repeat(turn, turns, documents.device)


def repeat(work: Callable[[], None], times: int, device: torch.device) -> None:
    """The same work on the same tensors, again and again. On a device it is recorded once: small kernels take longer to
    launch one by one than to run."""
    if device.type != "cuda" or times < RECORDED_FROM:
        for _ in range(times):
            work()
        return
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()  # kernels are compiled and libraries set up at first use: neither can be recorded
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
        for _ in range(times - 1):
            graph.replay()
    stream.synchronize()  # what was recorded owns its memory: it must not end before its work


def nonnegative(fixed: Tensor, free: Tensor, k: int, sweeps: int) -> None:
    """Some sweeps of nonnegative least squares for the factor of `free`, in place."""
    rank = len(free) - k
    if fixed.is_cuda:
        parts = fixed.view(len(fixed), PARTS, -1).transpose(0, 1)
        products = (parts[:, rank:] @ parts.transpose(1, 2)).sum(0)
    else:
        products = fixed[rank:] @ fixed.T
    target = products[:, :rank] @ free[:rank]
    gram = products[:, rank:].contiguous()
    sweep_columns(target, gram, free[rank:], sweeps)


def sweep_columns(target: Tensor, gram: Tensor, free: Tensor, sweeps: int) -> None:
    """Coordinate descent for min over w >= 0 of w gram w / 2 - c w, for each column c of `target` and w of `free`."""
    if triton_runs_on(free.device):
        from paceline.workloads.topics.triton_calls import least_squares_columns

        least_squares_columns(target, gram, free, sweeps)
    else:
        plain_sweeps(target, gram, free, sweeps)


def plain_sweeps(target: Tensor, gram: Tensor, free: Tensor, sweeps: int) -> None:
    for _ in range(sweeps):
        for a in range(len(free)):
            step = (target[a] - gram[a] @ free) / gram[a, a].clamp_min(TINY)
            free[a].add_(step).clamp_min_(0)
