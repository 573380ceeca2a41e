"""Loops compiled by numba: find nonzeros while rows are read, and update documents on CPU cores.

Numbers that are not counts up to 65,535 are left to `matrices.WideningArray`.
"""

import functools
import math

import numpy as np
from numba import njit

from paceline.workloads.topics.counts.matrices import LARGEST as LARGEST_OF
from paceline.workloads.topics.counts.matrices import Csr, shrink

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"


AT_ONCE = 8  # numbers that are skipped together where all are zero
LARGEST_SCANNED = LARGEST_OF[np.dtype(np.uint16)]
NOT_TAKEN = -1


def compile_kernel(function, fastmath=True):
    """Compile a function when it is first called, and cache it on disk if possible."""
    options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache
        return njit(**options)(function)


compile_exactly = functools.partial(compile_kernel, fastmath=False)  # NaN must be seen


class NonzeroScanner:
    """Collect the nonzeros of rows that are added in order, up to a number of them. Floats have 4 or 8 bytes."""

    def __init__(self, rows: int, room: int) -> None:
        self.indptr = np.zeros(rows + 1, np.int64)
        self.indices, self.data = np.empty(room + AT_ONCE, np.int32), np.empty(room + AT_ONCE, np.uint16)
        self.rows = self.count = 0

    def add(self, rows: np.ndarray) -> bool:
        values = rows.view(np.uint8) if rows.dtype == np.bool_ else rows
        ends = self.indptr[self.rows + 1 : self.rows + 1 + len(rows)]
        found = _scan_rows(values, values.view(f"u{values.itemsize}"), self.indices, self.data, self.count, ends)
        if found == NOT_TAKEN:
            return False
        self.rows, self.count = self.rows + len(rows), found
        return True

    def csr(self) -> Csr:
        return Csr(self.indptr, self.indices[: self.count].copy(), shrink(self.data[: self.count]))


@compile_exactly
def _scan_rows(values, bits, indices, data, count, ends):
    """Append the nonzeros of each row, and where they end; return how many there are then, or NOT_TAKEN."""
    rows, terms = values.shape
    room = len(indices) - AT_ONCE
    for i in range(rows):
        odd = False
        for first in range(0, terms - AT_ONCE + 1, AT_ONCE):
            some = bits[i, first]
            for j in range(1, AT_ONCE):
                some |= bits[i, first + j]
            if some:
                count, is_odd = _append_counts(values[i], first, AT_ONCE, indices, data, count)
                odd |= is_odd
                if count > room:
                    return NOT_TAKEN
        rest = terms % AT_ONCE
        count, is_odd = _append_counts(values[i], terms - rest, rest, indices, data, count)
        if odd or is_odd or count > room:
            return NOT_TAKEN
        ends[i] = count
    return count


@compile_exactly
def _append_counts(row, first, many, indices, data, count):
    """Append nonzeros of a row; return how many there are then, and whether one is no small count."""
    odd = False
    for j in range(first, first + many):
        x = row[j]
        fits = x >= 0 and x <= LARGEST_SCANNED
        whole = np.uint16(x if fits else 0)
        odd |= not fits or whole != x
        indices[count], data[count] = j, whole
        count += whole != 0
    return count, odd


TINY = np.float32(1e-30)
SHRINK = np.float32(0.05)  # of its value a share keeps at least, in one Newton step: every p stays positive
LEAST = np.float32(1e-10)
LOG2 = math.log(2)
HUGE = 1e300
SWEEPS = 2  # of coordinate descent in a Newton step
ROOT_HALF_BITS = np.int32(0x3F3504F3)  # of sqrt(1/2) in float32


@compile_kernel
def _sum_x_log(x, p, bits, count):
    """Return the sum of x log p over `count` entries; `bits` are those of p, which is overwritten.

    p = 2^e m with m near 1, and log m by its series in (m - 1) / (m + 1), up to 1e-9: six times as fast as `math.log`,
    since it is vectorised.
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


@compile_kernel
def run_em_step(indptr, indices, data, L, Ft, S, want_loss):
    """Update each row of L in place by one EM step, and add to S the statistic of F; return the loss, or 0 without
    `want_loss`. S and the loss, the sum of -x log p, are those of L before the step.
    """
    rows, k = L.shape
    K = Ft.shape[1]
    p, bits, x = _make_row_buffers(indptr)
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


@compile_kernel
def solve_rows(indptr, indices, data, L, Ft, steps, tolerance):
    """Update rows of L by Newton steps until the loss changes by `tolerance`; return the sum of -x log p."""
    rows, k = L.shape
    K = Ft.shape[1]
    p, bits, x = _make_row_buffers(indptr)
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
            _minimise_quadratic_model(indices[first : first + count], data[first : first + count], Ft, (u, g, H), x, p)
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


@compile_kernel
def _minimise_quadratic_model(indices, data, Ft, model, x, p):
    """Set u of one document to the minimum of a quadratic model of its loss, (u, gradient, curvature), and p, x.

    Coordinate descent finds it; no share falls below a part of its value.
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


@compile_kernel
def _make_row_buffers(indptr):
    """Return p, its bits and x for the longest row."""
    longest = 0
    for i in range(len(indptr) - 1):
        longest = max(longest, indptr[i + 1] - indptr[i])
    p = np.empty(longest, np.float32)
    return p, p.view(np.int32), np.empty(longest, np.float32)
