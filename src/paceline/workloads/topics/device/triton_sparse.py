# mypy: ignore-errors
"""Kernels of the topic model in Triton: rows of nonzeros, worked on with F' = F / q as in `triton_dense`."""

import triton
import triton.language as tl

EM, NEWTON, PRODUCT = (tl.constexpr(mode) for mode in (1, 2, 3))
SMALLEST = tl.constexpr(1e-12)  # of p' in the sparse kernels: only a term that no topic of a document has falls below


@triton.jit
def coordinate_sweeps(li, gradient, H, k, K: tl.constexpr, SWEEPS: tl.constexpr):
    """Coordinate descent on the quadratic model of one document. No share falls below a twentieth of what it was: the
    model is trusted no further, and every p stays positive."""
    topic = tl.arange(0, K)
    floor = tl.maximum(li * 0.05, 1e-9)
    for _ in tl.static_range(SWEEPS):
        for a in range(k):
            here = topic == a
            row = tl.sum(tl.where(here[:, None], H, 0.0), axis=0)
            curvature = tl.sum(tl.where(here, row, 0.0))
            slope = tl.sum(tl.where(here, gradient, 0.0))
            old = tl.sum(tl.where(here, li, 0.0))
            least = tl.sum(tl.where(here, floor, 0.0))
            new = tl.maximum(old - slope / (curvature * 1.000001 + 1e-20), least)
            li = tl.where(here, new, li)
            gradient += (new - old) * row
    return tl.where(topic < k, li, 0.0)


@triton.jit
def sparse_rows(
    POINTER, INDEX, COUNT, L, F, LOSS, TOTAL, k,
    MODE: tl.constexpr, WITH_LOSS: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """One program per document, NB of its nonzeros at a time. L is (documents, k), F is (terms, K).

    EM and NEWTON update L[i] in place. PRODUCT: L[i] = sum_j x_ij F[j].
    """
    i = tl.program_id(0).to(tl.int64)
    topic = tl.arange(0, K)
    real = topic < k
    begin = tl.load(POINTER + i)
    end = tl.load(POINTER + i + 1)
    li = tl.load(L + i * k + topic, mask=real, other=0.0)
    g = tl.zeros((K,), dtype=tl.float32)
    H = tl.zeros((K, K), dtype=tl.float32)
    loss = 0.0
    for start in range(begin, end, NB):
        at = start + tl.arange(0, NB)
        inside = at < end
        j = tl.load(INDEX + at, mask=inside, other=0).to(tl.int64)
        w = tl.load(COUNT + at, mask=inside, other=0).to(tl.float32)
        f = tl.load(F + j[:, None] * K + topic[None, :])
        if MODE != PRODUCT:
            p = tl.maximum(tl.sum(f * li[None, :], axis=1), SMALLEST)
            if WITH_LOSS:
                loss += tl.sum(w * tl.log(p))
            w = w / p
            if MODE == NEWTON:
                H += tl.dot(tl.trans(f * (w / p)[:, None]), f)
        g += tl.sum(f * w[:, None], axis=0)
    if WITH_LOSS:
        tl.store(LOSS + i, loss)
    if MODE == PRODUCT:
        li = g
    else:
        if MODE == NEWTON:  # noqa: SIM108
            new = coordinate_sweeps(li, tl.load(TOTAL + i) - g, H, k, K, SWEEPS)
        else:
            new = li * g
        norm = tl.sum(new)
        li = tl.where(norm > 0, new / tl.maximum(norm, 1e-30), li)
    tl.store(L + i * k + topic, li, mask=real)


@triton.jit
def sparse_terms(
    TERM, BEGIN, END, DOCUMENT, COUNT, L, F, S, k, RATIO: tl.constexpr, K: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """S[j] += sum_i x_ij / p_ij l_i for one piece of one term's documents. RATIO off: S[j] += sum_i x_ij l_i."""
    item = tl.program_id(0)
    topic = tl.arange(0, K)
    real = topic < k
    term = tl.load(TERM + item).to(tl.int64)
    end = tl.load(END + item)
    f = tl.load(F + term * K + topic)
    g = tl.zeros((K,), dtype=tl.float32)
    for start in range(tl.load(BEGIN + item), end, NB):
        at = start + tl.arange(0, NB)
        inside = at < end
        i = tl.load(DOCUMENT + at, mask=inside, other=0).to(tl.int64)
        w = tl.load(COUNT + at, mask=inside, other=0).to(tl.float32)
        li = tl.load(L + i[:, None] * k + topic[None, :], mask=real[None, :], other=0.0)
        if RATIO:
            w = w / tl.maximum(tl.sum(li * f[None, :], axis=1), SMALLEST)
        g += tl.sum(li * w[:, None], axis=0)
    tl.atomic_add(S + term * K + topic, g, mask=real, sem="relaxed")
