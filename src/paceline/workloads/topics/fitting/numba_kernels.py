"""Passes over the nonzeros of documents on the cores of a machine, compiled by numba.

Terms are looked up by row: F transposed has the k values of a term side by side, and every loop over them is a few
vector instructions. For that the number of topics is rounded up, and the topics added are zero. It is not a constant of
the code: loops of known length are unrolled into single numbers, which is three times as slow.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import math

import numpy as np

from paceline.workloads.topics.counts.scan import compiled

TINY = np.float32(1e-30)
SHRINK = np.float32(0.05)  # of its value a share keeps at least, in one Newton step: every p stays positive
LEAST = np.float32(1e-10)
LOG2 = math.log(2)
HUGE = 1e300
SWEEPS = 2  # of coordinate descent in a Newton step
ROOT_HALF_BITS = np.int32(0x3F3504F3)  # of sqrt(1/2) in float32


@compiled
def _sum_x_log(x, p, bits, count):
    """The sum of x log p over `count` entries; `bits` are those of p, and p is lost.

    p = 2^e m with m near 1, and log m by its series in (m - 1) / (m + 1): six times as fast as `math.log`, since the
    compiler makes vector instructions of it. The series is cut below 1e-9.
    """
    whole, part = 0.0, 0.0
    for i in range(count):
        e = (bits[i] - ROOT_HALF_BITS) >> np.int32(23)
        whole += x[i] * np.float32(e)
        bits[i] -= e << np.int32(23)
    for i in range(count):
        m = p[i]
        s = (m - np.float32(1)) / (m + np.float32(1))
        z = s * s
        series = np.float32(1 / 7) + z * np.float32(1 / 9)
        series = np.float32(1 / 3) + z * (np.float32(1 / 5) + z * series)
        part += x[i] * (np.float32(2) * s * (np.float32(1) + z * series))
    return whole * LOG2 + part


@compiled
def em(indptr, indices, data, L, Ft, S, want_loss):
    """One EM step for each row of L, S from the rows before it. Returns the sum of -x log p before it."""
    rows, k = L.shape
    K = Ft.shape[1]
    longest = _longest(indptr)
    p, x = np.empty(longest, np.float32), np.empty(longest, np.float32)
    bits = p.view(np.int32)
    u, g = np.zeros(K, np.float32), np.empty(K, np.float32)
    loss = 0.0
    for i in range(rows):
        first = indptr[i]
        count = indptr[i + 1] - first
        if count == 0:
            continue
        u[:k] = L[i]
        g[:] = 0
        for e in range(count):
            f, s = Ft[indices[first + e]], S[indices[first + e]]
            q = TINY
            for a in range(K):
                q += u[a] * f[a]
            x[e] = data[first + e]
            p[e] = q
            w = x[e] / q
            for a in range(K):
                g[a] += w * f[a]
                s[a] += w * u[a]
        if want_loss:
            loss -= _sum_x_log(x, p, bits, count)
        total = np.float32(0)
        for a in range(k):
            g[a] *= u[a]
            total += g[a]
        if total > 0:
            for a in range(k):
                L[i, a] = g[a] / total
    return loss


@compiled
def newton(indptr, indices, data, L, Ft, S, want_loss):
    """One Newton step for each row of L, S from the rows after it. Returns the sum of -x log p before it."""
    rows, k = L.shape
    K = Ft.shape[1]
    longest = _longest(indptr)
    p, x = np.empty(longest, np.float32), np.empty(longest, np.float32)
    bits = p.view(np.int32)
    u, g, H = np.zeros(K, np.float32), np.empty(K, np.float32), np.empty((k, K), np.float32)
    loss = 0.0
    for i in range(rows):
        first = indptr[i]
        count = indptr[i + 1] - first
        if count == 0:
            continue
        u[:k] = L[i]
        _newton_step(indices[first : first + count], data[first : first + count], Ft, (u, g, H), x, p)
        if want_loss:
            loss -= _sum_x_log(x, p, bits, count)
        L[i] = u[:k]
        for e in range(count):
            f, s = Ft[indices[first + e]], S[indices[first + e]]
            q = TINY
            for a in range(K):
                q += u[a] * f[a]
            w = x[e] / q
            for a in range(K):
                s[a] += w * u[a]
    return loss


@compiled
def solve(indptr, indices, data, L, Ft, steps, tolerance):
    """Newton steps for each row of L, until its loss changes by less than `tolerance`. Returns the sum of -x log p."""
    rows, k = L.shape
    K = Ft.shape[1]
    longest = _longest(indptr)
    p, x = np.empty(longest, np.float32), np.empty(longest, np.float32)
    bits = p.view(np.int32)
    u, g, H = np.zeros(K, np.float32), np.empty(K, np.float32), np.empty((k, K), np.float32)
    loss = 0.0
    for i in range(rows):
        first = indptr[i]
        count = indptr[i + 1] - first
        if count == 0:
            continue
        u[:k] = L[i]
        best = HUGE
        for _ in range(steps + 1):
            now = u[:k].copy()
            _newton_step(indices[first : first + count], data[first : first + count], Ft, (u, g, H), x, p)
            found = -_sum_x_log(x, p, bits, count)  # of the row before that step
            gain = best - found
            if gain > 0:
                best = found
                L[i] = now
            else:
                u[:k] = (now + L[i]) / 2  # the step was too long: half way back
            if abs(gain) <= tolerance * abs(found):
                break
        loss += best
    return loss


@compiled
def _newton_step(indices, data, Ft, model, x, p):
    """One document: p of its terms, then a quadratic model of its loss, and u at the model's minimum;
    the model is (u, its gradient, its curvature).

    The minimum is found by coordinate descent; no share falls below a part of its value.
    """
    u, g, H = model
    k, K = H.shape
    g[:] = 0
    H[:] = 0
    length = np.float32(0)
    for e in range(len(indices)):
        f = Ft[indices[e]]
        q = TINY
        for a in range(K):
            q += u[a] * f[a]
        x[e] = data[e]
        length += x[e]
        p[e] = q
        w = x[e] / q
        for a in range(K):
            g[a] -= w * f[a]
        w /= q
        for a in range(k):
            h, z = H[a], w * f[a]
            for b in range(K):
                h[b] += z * f[b]
    least = np.maximum(SHRINK * u, LEAST)
    for a in range(k):
        g[a] += length
    for _ in range(SWEEPS):
        for a in range(k):
            h = H[a]
            new = max(u[a] - g[a] / (h[a] * np.float32(1 + 1e-6) + np.float32(1e-20)), least[a])
            step = new - u[a]
            u[a] = new
            for b in range(K):
                g[b] += step * h[b]
    total = np.float32(0)
    for a in range(k):
        total += u[a]
    for a in range(k):
        u[a] /= total


@compiled
def _longest(indptr):
    longest = 0
    for i in range(len(indptr) - 1):
        longest = max(longest, indptr[i + 1] - indptr[i])
    return longest
