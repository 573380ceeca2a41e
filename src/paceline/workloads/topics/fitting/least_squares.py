"""First topics by least squares on a compressed, weighted matrix.

Y = counts / document length / sqrt(term share) has noise of about equal size, so least squares on it is close to
maximum likelihood. A randomised range finder writes Y as Q B^T, a few columns more than topics; coordinate descent
(HALS) then finds nonnegative factors of the pair, first on a sample of documents and terms, then on all.
"""

from dataclasses import dataclass
from typing import Any

import torch

from paceline.workloads.topics.fitting.passes import MatrixProducts, can_run_triton

Tensor = Any  # torch is not typed here
TINY = 1e-20
SMOOTHING = 0.5  # counts that are added to each term: more of them give rare terms less weight
EXTRA = 10  # columns of the basis, beside one for each topic
POWERS = 2  # times that the basis is brought nearer to the largest axes
SWEEPS, CARRY_SWEEPS = 2, 20
RECORDED_FROM = 8  # turns
PARTS = 64  # of long sums on a device, so that all of its processors work


@dataclass(frozen=True)
class SweepCounts:
    """Alternations of both factors: on a sample of so many documents and terms, then on all."""

    sample: int = 16384
    on_sample: int = 100
    on_all: int = 100


class WeightedCounts:
    """Y: the rows of X, weighted so that their noise is alike."""

    def __init__(self, X: MatrixProducts, per_document: Tensor, per_term: Tensor) -> None:
        self.X, self.length, share = X, per_document.float(), per_term.float() + SMOOTHING
        self.share = share / share.sum()
        self.root_share = self.share.sqrt()
        self.weight = (self.length / self.length.mean()).sqrt()  # of a document: long ones are known better
        to_row = self.weight / self.length.clamp_min(TINY)
        self.to_row = torch.where(self.length > 0, to_row, torch.zeros_like(self.length))

    def multiply(self, B: Tensor) -> Tensor:  # Y @ B
        return self.X.multiply(B / self.root_share[:, None]) * self.to_row[:, None]

    def multiply_t(self, C: Tensor) -> Tensor:  # Y.T @ C
        return self.X.multiply_t(C * self.to_row[:, None]) / self.root_share[:, None]

    def topics(self, terms: Tensor) -> Tensor:
        F = terms * self.root_share
        Ft = (F / F.sum(1).clamp_min(TINY)[:, None]).T
        return (Ft / Ft.sum(0)).contiguous()


def find_topics_by_least_squares(
    X: MatrixProducts, per_document: Tensor, per_term: Tensor, k: int, seed: int, turns: SweepCounts
) -> Tensor:
    """Return F transposed (m, k), its columns on the simplex; needs at least k documents and k terms."""
    n, m = len(per_document), len(per_term)
    Y = WeightedCounts(X, per_document, per_term)
    random = torch.Generator(device=per_term.device).manual_seed(seed)
    Q = Y.multiply(torch.randn(m, min(k + EXTRA, n, m), device=random.device, generator=random))
    for _ in range(POWERS):
        Q = Y.multiply(make_orthonormal(Y.multiply_t(make_orthonormal(Q))))
    Q = make_orthonormal(Q)  # a basis of most of the column space of Y
    B = Y.multiply_t(Q)  # Y is about Q B^T
    W = torch.rand(k, n, device=Q.device, generator=random) * Y.weight  # documents: L^T, each times its weight
    G = (B @ pick_extreme_rows(Q, B, Y.weight, Y.length, k)).clamp_min(0).T + 1e-3 * B.abs().mean()
    documents, terms = stack_side(Q.T, W), stack_side(B.T, G)
    on_all = turns.on_all
    if turns.sample < max(n, m):
        some = [torch.randperm(size, device=Q.device, generator=random)[: turns.sample] for size in (n, m)]
        few_documents, few_terms = stack_side(Q[some[0]].T, W[:, some[0]]), stack_side(B[some[1]].T, G[:, some[1]])
        run_hals(few_documents, few_terms, k, turns.on_sample)
        solve_nonnegative(few_documents, terms, k, CARRY_SWEEPS)  # what the sample found, carried over to all
        solve_nonnegative(terms, documents, k, CARRY_SWEEPS)
    else:
        on_all += turns.on_sample
    run_hals(documents, terms, k, on_all)
    return Y.topics(terms[-k:, :m])


def make_orthonormal(A: Tensor) -> Tensor:
    """Return a basis of the columns of a tall matrix, from its Gram matrix; dependent columns become zero."""
    double = A.double()
    sizes, axes = torch.linalg.eigh((double.T @ double).cpu())
    scale = torch.where(sizes > 1e-12 * sizes[-1], sizes.clamp_min(1e-300).rsqrt(), torch.zeros_like(sizes))
    return A @ (axes * scale).to(A)


def pick_extreme_rows(Q: Tensor, B: Tensor, weight: Tensor, length: Tensor, k: int) -> Tensor:
    """Return the coordinates (rank, k) of k documents, each the farthest from those before.

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


def stack_side(basis: Tensor, factor: Tensor) -> Tensor:
    """Stack a basis (rank, size) on its factor (k, size), padded with zero columns to a multiple of PARTS."""
    both = torch.cat([basis, factor])
    return torch.nn.functional.pad(both, (0, -both.shape[1] % PARTS)).contiguous()


def run_hals(documents: Tensor, terms: Tensor, k: int, turns: int) -> None:
    """Update both factors in turns, on a GPU as a CUDA graph, as small kernels launch slowly."""

    def update_factors() -> None:
        solve_nonnegative(terms, documents, k, SWEEPS)
        solve_nonnegative(documents, terms, k, SWEEPS)

    device = documents.device
    if device.type != "cuda" or turns < RECORDED_FROM:
        for _ in range(turns):
            update_factors()
        return
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        update_factors()  # compiles kernels and loads libraries, which cannot be captured
        graph.capture_begin(capture_error_mode="thread_local")
        update_factors()
        graph.capture_end()
        for _ in range(turns - 1):
            graph.replay()
    stream.synchronize()  # the graph owns its memory


def solve_nonnegative(fixed: Tensor, free: Tensor, k: int, sweeps: int) -> None:
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
    """Minimise w gram w / 2 - c w over w >= 0 by coordinate descent, for columns c of `target` and w of `free`."""
    if can_run_triton(free.device):
        from paceline.workloads.topics.fitting.triton_passes import solve_columns

        solve_columns(target, gram, free, sweeps)
    else:
        sweep_columns_in_torch(target, gram, free, sweeps)


def sweep_columns_in_torch(target: Tensor, gram: Tensor, free: Tensor, sweeps: int) -> None:
    for _ in range(sweeps):
        for a in range(len(free)):
            step = (target[a] - gram[a] @ free) / gram[a, a].clamp_min(TINY)
            free[a].add_(step).clamp_min_(0)
