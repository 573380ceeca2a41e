"""Triton kernels of the topic model: dense counts, least squares, and rows of nonzeros.

All of them work on F' = F / q, q the share of each term in all counts: then p' = L F' is of order one, and half
precision holds it. The product L F' never leaves the chip. A document or a term without counts adds nothing.

`FAST` is for NVIDIA devices and uint8 counts: assembly that turns counts into halves some at a time, with one
reciprocal for two elements. Without it the kernels run on any device, and on the CPU under TRITON_INTERPRET=1.
"""

from pathlib import Path

import triton
import triton.language as tl

from paceline.io.safe_yaml import load_yaml

# mypy: ignore-errors

ASSEMBLY = load_yaml(Path(__file__).with_name("triton_assembly.yaml").read_text("utf-8"))
RATIO_4 = tl.constexpr(ASSEMBLY["RATIO_4"])
HALF_4 = tl.constexpr(ASSEMBLY["HALF_4"])
PAIR_RATIOS = tl.constexpr(ASSEMBLY["PAIR_RATIOS"])
PAIR_LOGS = tl.constexpr(ASSEMBLY["PAIR_LOGS"])
LOG_4 = tl.constexpr(ASSEMBLY["LOG_4"])


@triton.jit
def divide_counts(x, p, FAST: tl.constexpr, operand: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(RATIO_4, "=r,=r,r,r,r,r,r", [x, p], dtype=tl.float16, is_pure=True, pack=4)
    else:  # noqa: RET505 - the compiler follows one branch only
        return (x.to(tl.float32) / p).to(operand)


@triton.jit
def convert_counts(x, FAST: tl.constexpr, operand: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(HALF_4, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:  # noqa: RET505
        return x.to(operand)


@triton.jit
def divide_pairs(pair, p0, p1, FAST: tl.constexpr):
    if FAST:
        both: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(PAIR_RATIOS, "=r,=r,r,r,r,r,r", [pair, p0, p1], both, is_pure=True, pack=2)
    else:  # noqa: RET505
        x, y = (pair & 255).to(tl.float32), ((pair >> 8) & 255).to(tl.float32)
        return (x / p0).to(tl.float16), (y / p1).to(tl.float16)


@triton.jit
def compute_pair_logs(pair, p0, p1, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            PAIR_LOGS, "=r,=r,r,r,r,r,r", [pair, p0, p1], dtype=tl.float32, is_pure=True, pack=2
        )
    else:  # noqa: RET505
        return (pair & 255).to(tl.float32) * tl.log2(p0) + ((pair >> 8) & 255).to(tl.float32) * tl.log2(p1)


@triton.jit
def accumulate_pairs(
    X, U, V, OWN, OTHER, LOSS, width, pairs, pairs_per_split,
    WITH_LOSS: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, STAGGER: tl.constexpr,
):  # fmt: skip
    """Sum both statistics of counts up to 255 in one read: OWN[i] += sum_j x_ij / (u_i v_j) v_j for BM documents, and
    OTHER[j] += sum_i x_ij / (u_i v_j) u_i; WITH_LOSS also LOSS[i] += sum_j x_ij log2(u_i v_j).

    X is read as pairs of counts, (documents, width) of int16; V and OTHER hold first the even terms, then the odd ones.
    The registers then hold the counts as the products need them. Sums go out through float32 atomics. Both sides are
    padded to whole tiles, with no counts and u v > 0 there.
    """
    own = tl.program_id(0) * BM + tl.arange(0, BM)
    topic = tl.arange(0, K)
    begin = tl.program_id(1) * pairs_per_split
    span = tl.minimum(pairs_per_split, pairs - begin)
    first = tl.program_id(0) * STAGGER % (span // BN) * BN  # programs that walk side by side would add to the same sums
    pair = begin + tl.arange(0, BN)
    u = tl.load(U + own[:, None] * K + topic[None, :])
    total = tl.zeros((BM, K), dtype=tl.float32)
    loss = tl.zeros((BM,), dtype=tl.float32)
    x_at = X + own.to(tl.int64)[:, None] * width + pair[None, :]
    term_at = pair[:, None] * K + topic[None, :]
    tl.assume(span > 0)  # else the compiler keeps a path without a turn, and matrix products wait for each other
    for step in tl.range(0, span, BN, num_stages=STAGES):
        at = first + step
        at = tl.where(at < span, at, at - span)
        x = tl.load(x_at + at)
        v0 = tl.load(V + term_at + at * K)
        v1 = tl.load(V + term_at + (pairs + at) * K)
        p0 = tl.dot(u, tl.trans(v0), out_dtype=tl.float32)
        p1 = tl.dot(u, tl.trans(v1), out_dtype=tl.float32)
        r0, r1 = divide_pairs(x, p0, p1, FAST)
        total = tl.dot(r0, v0, total, out_dtype=tl.float32)
        total = tl.dot(r1, v1, total, out_dtype=tl.float32)
        part0 = tl.dot(tl.trans(r0), u, out_dtype=tl.float32)
        part1 = tl.dot(tl.trans(r1), u, out_dtype=tl.float32)
        tl.atomic_add(OTHER + term_at + at * K, part0, sem="relaxed")
        tl.atomic_add(OTHER + term_at + (pairs + at) * K, part1, sem="relaxed")
        if WITH_LOSS:
            loss += tl.sum(compute_pair_logs(x, p0, p1, FAST), axis=1)
    tl.atomic_add(OWN + own[:, None] * K + topic[None, :], total, sem="relaxed")
    if WITH_LOSS:
        tl.atomic_add(LOSS + own, loss, sem="relaxed")


@triton.jit
def multiply_by_log2(x, p, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(LOG_4, "=r,=r,=r,=r,r,r,r,r,r", [x, p], dtype=tl.float32, is_pure=True, pack=4)
    else:  # noqa: RET505
        return x.to(tl.float32) * tl.log2(p)


@triton.jit
def accumulate_dense(
    X, U, V, OWN, OTHER, LOSS, width, others, others_per_split,
    TERMS: tl.constexpr, RATIO: tl.constexpr, BOTH: tl.constexpr, WITH_LOSS: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `accumulate_pairs`, for any counts, one statistic or both: OWN[i] += sum_j x_ij / (u_i v_j) v_j; BOTH: also
    OTHER[j] += sum_i x_ij / (u_i v_j) u_i. RATIO off: OWN[i] += sum_j x_ij v_j, a plain product.

    X is (documents, width). The own side is that of the documents, or with TERMS that of the terms.
    """
    own = tl.program_id(0) * BM + tl.arange(0, BM)
    topic = tl.arange(0, K)
    begin = tl.program_id(1) * others_per_split
    end = tl.minimum(begin + others_per_split, others)
    other = tl.arange(0, BN)
    u = tl.load(U + own[:, None] * K + topic[None, :])
    total = tl.zeros((BM, K), dtype=tl.float32)
    loss = tl.zeros((BM,), dtype=tl.float32)
    wide = width.to(tl.int64)
    if TERMS:  # noqa: SIM108
        x_at = X + own[:, None] + other[None, :] * wide
    else:
        x_at = X + own[:, None] * wide + other[None, :]
    other_at = other[:, None] * K + topic[None, :]
    tl.assume(end > begin)
    for at in tl.range(begin, end, BN, num_stages=STAGES):
        x = tl.load(x_at + at * wide if TERMS else x_at + at)
        v = tl.load(V + other_at + at * K)
        if RATIO:
            p = tl.dot(u, tl.trans(v), out_dtype=tl.float32)
            r = divide_counts(x, p, FAST, V.dtype.element_ty)
        else:
            r = convert_counts(x, FAST, V.dtype.element_ty)
        total = tl.dot(r, v, total, out_dtype=tl.float32)
        if BOTH:
            part = tl.dot(tl.trans(r), u, out_dtype=tl.float32)
            tl.atomic_add(OTHER + other_at + at * K, part, sem="relaxed")
        if WITH_LOSS:
            loss += tl.sum(multiply_by_log2(x, p, FAST), axis=1)
    tl.atomic_add(OWN + own[:, None] * K + topic[None, :], total, sem="relaxed")
    if WITH_LOSS:
        tl.atomic_add(LOSS + own, loss, sem="relaxed")


@triton.jit
def small_sums_kernel(
    X, ROWS, TERMS, rows, terms, rows_per_split, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.program_id(1) * rows_per_split
    total = tl.zeros((BM, BN), dtype=tl.int32)  # of every BM-th row: columns are added up across warps once, at the end
    for at in range(begin, tl.minimum(begin + rows_per_split, rows), BM):
        i = at + tl.arange(0, BM)
        inside = (i < rows)[:, None] & (j < terms)[None, :]
        x = tl.load(X + i.to(tl.int64)[:, None] * terms + j[None, :], mask=inside, other=0).to(tl.int32)
        total += x
        tl.atomic_add(ROWS + i, tl.sum(x, axis=1).to(tl.int64), mask=i < rows, sem="relaxed")
    tl.atomic_add(TERMS + j, tl.sum(total, axis=0).to(tl.int64), mask=j < terms, sem="relaxed")


@triton.jit
def sweep_least_squares(
    C, A, W, n, k, sweeps, K: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Sweep by coordinate descent for min over w >= 0 of w A w / 2 - c w, for each column w of W (k x n), in place."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    topic = tl.arange(0, K)
    inside = (topic < k)[:, None] & (column < n)[None, :]
    at = topic.to(tl.int64)[:, None] * n + column[None, :]
    c = tl.load(C + at, mask=inside, other=0.0)
    w = tl.load(W + at, mask=inside, other=0.0)
    for _ in range(sweeps):
        for a in range(k):
            row = tl.load(A + a * k + topic, mask=topic < k, other=0.0)
            curvature = tl.load(A + a * k + a)
            here = (topic == a)[:, None]
            rest = tl.sum(tl.where(here, c, 0.0) - row[:, None] * w, axis=0)
            old = tl.sum(tl.where(here, w, 0.0), axis=0)
            new = tl.maximum(old + rest / tl.maximum(curvature, 1e-20), 0.0)
            w = tl.where(here, new[None, :], w)
    tl.store(W + at, w, mask=inside)


SMALLEST = tl.constexpr(1e-12)  # of p' in the sparse kernels: only a term that no topic of a document has falls below


@triton.jit
def update_sparse_rows(
    POINTER, INDEX, COUNT, L, F, LOSS, k,
    RATIO: tl.constexpr, WITH_LOSS: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """One program per document, NB of its nonzeros at a time. L is (documents, k), F is (terms, K).

    RATIO: an EM step of L[i], in place. RATIO off: L[i] = sum_j x_ij F[j].
    """
    i = tl.program_id(0).to(tl.int64)
    topic = tl.arange(0, K)
    real = topic < k
    begin = tl.load(POINTER + i)
    end = tl.load(POINTER + i + 1)
    li = tl.load(L + i * k + topic, mask=real, other=0.0)
    g = tl.zeros((K,), dtype=tl.float32)
    loss = 0.0
    for start in range(begin, end, NB):
        at = start + tl.arange(0, NB)
        inside = at < end
        j = tl.load(INDEX + at, mask=inside, other=0).to(tl.int64)
        w = tl.load(COUNT + at, mask=inside, other=0).to(tl.float32)
        f = tl.load(F + j[:, None] * K + topic[None, :])
        if RATIO:
            p = tl.maximum(tl.sum(f * li[None, :], axis=1), SMALLEST)
            if WITH_LOSS:
                loss += tl.sum(w * tl.log(p))
            w = w / p
        g += tl.sum(f * w[:, None], axis=0)
    if WITH_LOSS:
        tl.store(LOSS + i, loss)
    if RATIO:
        new = li * g
        norm = tl.sum(new)
        li = tl.where(norm > 0, new / tl.maximum(norm, 1e-30), li)
    else:
        li = g
    tl.store(L + i * k + topic, li, mask=real)


@triton.jit
def accumulate_sparse_terms(
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
