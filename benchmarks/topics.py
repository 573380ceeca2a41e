"""Topic models on CPU cores: against other programs, on a matrix larger than memory, and on two ranks.

    python benchmarks/topics.py [DATA_FOLDER] [--only race,stream,scaling] [--cache FILE] [--quick]

    race      NIPS papers, 20 newsgroups (from DATA_FOLDER, ../shared/data if not given) and dense generated counts:
              time and loss of each peer, our time to that loss, and the loss we end with. Peers are used if they are
              installed; their results are kept in the --cache file, and not computed again
    stream    a generated .npy and shards of the same documents, not in the page cache: bytes per second of a pass
              against a plain read of the file, passes per second, and peak memory of the process
    scaling   2 ranks of one thread against two independent one-thread fits started together, and the bytes that a
              pass sends

The machine should do nothing else. Counts are in memory for all in the race, as each of them wants them (tinytopics a
dense float32 tensor, we and scikit-learn nonzeros where the counts are sparse). Our time is wall time from the call of
`fit` to the end of the pass whose point has the loss, with the start; the kernels were compiled before, by tiny fits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from topics_peers import Problem, Result, blas_threads, busy_note, on_simplex, peer_results, table

SECTIONS = ("race", "stream", "scaling")
CORES = len(os.sched_getaffinity(0))
ASKED = {
    ("NIPS", "tinytopics"): 100,
    ("20 newsgroups", "tinytopics"): 100,
    ("dense", "tinytopics"): 80,
    **{(name, "scikit-learn"): 10 for name in ("NIPS", "20 newsgroups", "dense")},
}
STREAM_TERMS, STREAM_WORDS, STREAM_POOL = 25_000, 1_300, 2_000
STREAM_K, STREAM_PASSES = 20, 3
READ_BYTES = 4 << 20
STARTS = 8  # of the fit that is compared with the shipped one, beside the single fit
FEW, MANY = 5, 25  # passes of two runs, whose difference is that of the passes alone


def say(text: str) -> None:
    print(text, flush=True)


# ---- race ------------------------------------------------------------------------------------------------------------


def problems(data: Path, quick: bool) -> Iterator[Problem | str]:
    """Each problem, or why it is left out."""
    for name, folder, k in (("NIPS", "nips_counts", 10), ("20 newsgroups", "newsgroups_counts", 20)):
        path = data / folder / "counts_csr.npz"
        if not path.is_file():
            yield f"{name}: left out, there is no {path}; give the folder that holds {folder} as the first word"
            continue
        import scipy.sparse

        X = scipy.sparse.csr_array(scipy.sparse.load_npz(path))
        yield Problem(name, X[:: X.shape[0] // 150] if quick else X, k, None if quick else shipped(path))
    from synthetic_counts import generate_synthetic_data

    n, words = (200, 2_000) if quick else (5_000, 65_536)
    yield Problem("dense", generate_synthetic_data(n, n, 20, words)[0], 20)


def shipped(counts: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """The fit that lies beside the counts."""
    paths = [counts.with_name(f"{name}_fastTopics.safetensors") for name in "LF"]
    if not all(path.is_file() for path in paths):
        return None
    from safetensors.numpy import load_file

    L, F = (next(iter(load_file(path).values())).astype(np.float64) for path in paths)
    return on_simplex(L, F)


class Ours:
    """Fits of one problem, all the same but for their times."""

    def __init__(self, problem: Problem, repeats: int) -> None:
        from synthetic_counts import exact_loss

        self.problem = problem
        self.runs = [self._fit() for _ in range(repeats)]
        self.model = self.runs[-1][0]
        self.loss = exact_loss(problem.X, self.model.L, self.model.F)
        self.seconds = statistics.median(whole_s for _, whole_s, _ in self.runs)

    def reach(self, loss: float) -> tuple[int, float] | None:
        """(passes, seconds) until a point has this loss or a lower one; seconds are the median of the fits."""
        found = [first_below(loss, trace) for _, _, trace in self.runs]
        if any(hit is None for hit in found):
            return None
        hits = [hit for hit in found if hit is not None]
        return hits[0][0], statistics.median(seconds for _, seconds in hits)

    def exact_after(self, passes: int) -> float:
        """Loss in float64 of the model that a fit of so many passes hands out."""
        from synthetic_counts import exact_loss

        from paceline.topics import fit

        model = fit(self.problem.X, self.problem.k, device="cpu", passes=passes)
        return exact_loss(self.problem.X, model.L, model.F)

    def best_of(self, starts: int) -> tuple[float, float]:
        """(loss in float64, seconds for all of them) of the best of several fits."""
        from synthetic_counts import exact_loss

        from paceline.topics import fit

        began = time.perf_counter()
        model = fit(self.problem.X, self.problem.k, device="cpu", starts=starts)
        return exact_loss(self.problem.X, model.L, model.F), time.perf_counter() - began

    def _fit(self) -> tuple[Any, float, list[tuple[float, float]]]:
        from paceline.topics import fit

        trace: list[tuple[float, float]] = []
        began = time.perf_counter()
        model = fit(
            self.problem.X,
            self.problem.k,
            device="cpu",
            progress=lambda _, turn: trace.append((time.perf_counter() - began, turn.loss)),
        )
        return model, time.perf_counter() - began, trace


def first_below(loss: float, trace: Iterable[tuple[float, float]]) -> tuple[int, float] | None:
    """(number of the pass, seconds) where the loss is first reached."""
    return next(((at, seconds) for at, (seconds, found) in enumerate(trace, 1) if found <= loss), None)


def warm_up() -> None:
    """Compile what the fits use: nonzeros and rows of small and of large counts."""
    import scipy.sparse
    from synthetic_counts import generate_synthetic_data

    from paceline.topics import fit

    X = generate_synthetic_data(60, 50, 3, 200)[0]
    for largest in (9, 300):
        X[0, 0] = min(largest, 255)
        wide = X.astype(np.int32)
        wide[0, 0] = largest
        for counts in (wide, scipy.sparse.csr_array(wide)):
            fit(counts, 3, device="cpu", passes=2)


def race(options: argparse.Namespace) -> None:
    import torch

    for problem in problems(options.data, options.quick):
        if isinstance(problem, str):
            say(f"\n{problem}")
            continue
        say(f"\n{problem.title}, {options.threads} threads")
        epochs = options.newsgroups_epochs if problem.name == "20 newsgroups" else options.epochs
        rounds = {"tinytopics": epochs or options.epochs, "scikit-learn": options.iterations}
        results = peer_results(problem, rounds, options.threads, options.cache, say)
        torch.set_num_threads(options.threads)
        warm_up()
        if note := busy_note():
            say(f"  ours: {note}")
        with blas_threads(options.threads):
            say(race_report(problem, results, Ours(problem, options.repeats)))


def race_report(problem: Problem, results: list[Result], ours: Ours) -> str:
    from synthetic_counts import exact_loss

    rows, below = [], []
    for result in results:
        hit, asked = ours.reach(result.loss), ASKED.get((problem.name, result.name))
        row = [result.label, f"{result.seconds:,.1f}", f"{result.loss:,.0f}"]
        if hit is None:
            row += ["not reached", "", "", ""]
        else:
            passes, seconds = hit
            row += [
                f"{seconds:.2f}",
                str(passes),
                f"{ours.exact_after(passes):,.0f}",
                f"{result.seconds / seconds:,.0f}x",
            ]
        rows.append([*row, f"{asked}x" if asked else ""])
        below.append(ours.loss <= result.loss)
    head = ("peer", "seconds", "loss", "ours to it, s", "passes", "loss then", "ratio", "asked")
    lines = [table(head, rows)] if rows else []
    model = ours.model
    lines += [f"  {result.name}: {result.note}" for result in results if result.note]
    how = f"{model.passes} passes ({model.stopped_because})"
    lines.append(f"  ours to the end: {ours.seconds:.2f} s, {how}, loss {ours.loss:,.0f}")
    if rows:
        lines.append(f"  at or below the loss of {'both' if len(rows) == 2 else 'it'}: {yes(all(below))}")
    if problem.reference is not None:
        lines += against_shipped(ours, exact_loss(problem.X, *problem.reference))
    return "\n".join(lines)


def against_shipped(ours: Ours, reference: float) -> list[str]:
    """One fit as it comes, and the best of several: the optimum that is found depends on the start."""
    lines = [f"  fit shipped with the data: loss {reference:,.0f}"]
    best, seconds = ours.best_of(STARTS)
    named = (("one fit", ours.loss, ours.seconds), (f"the best of starts={STARTS}", best, seconds))
    for name, loss, taken in named:
        gain = 100 * (reference - loss) / abs(reference)
        verdict = f"log-likelihood at or above it: {yes(loss <= reference)} (loss lower by {gain:.4f} %)"
        lines.append(f"    {name}: loss {loss:,.0f} in {taken:.2f} s; {verdict}")
    return lines


def yes(true: bool) -> str:
    return "yes" if true else "NO"


# ---- stream ----------------------------------------------------------------------------------------------------------


def stream(options: argparse.Namespace) -> None:
    say(
        f"\nLarger than memory: generated text-like documents x {STREAM_TERMS:,} terms, k = {STREAM_K}, "
        f"{options.threads} threads; the page cache is emptied of the file before each read and each pass"
    )
    scratch = Path(tempfile.mkdtemp(prefix="paceline-topics-", dir=options.scratch))
    try:
        documents = max(64, int(options.gigabytes * 1e9 / (4 * STREAM_TERMS)))
        free = shutil.disk_usage(scratch).free
        if free < 1.4 * 4 * STREAM_TERMS * documents:
            say(f"  left out: {scratch} has {free / 1e9:.0f} GB free, and {1.4 * options.gigabytes:.0f} are needed")
            return
        rows, rates = [], {}
        pool = document_pool(options.quick)
        for kind in ("float32", "uint8"):
            path = scratch / f"{kind}.npy"
            write_npy(path, pool, documents, kind)
            row, rates[f"{kind} .npy"] = measured(path, [path], options)
            rows.append([f"{kind} .npy", *row])
            if kind == "float32":
                shards, began = scratch / "shards", time.perf_counter()
                from paceline.topics import convert

                convert(path, shards)
                converted_s = time.perf_counter() - began
                row, rates["shards"] = measured(shards, sorted(shards.glob("*.bin")), options)
                rows.append(["shards", *row])
            path.unlink()
        head = ("stored as", "GB", "plain read, GB/s", "pass, s", "GB/s", "of the read", "peak memory, GB", "start, s")
        say(table(head, rows))
        say(f"  {documents:,} documents; converted to shards in {converted_s:.1f} s (not cold)")
        for kind in ("float32 .npy", "uint8 .npy"):
            say(f"  shards against the {kind}: {rates['shards'] / rates[kind]:.1f}x passes per second")
        say("  asked: 70 % of the read and under 2 GB for the .npy, shards 5x")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def document_pool(quick: bool) -> np.ndarray:
    """Distinct documents; the file repeats them, which no reader of it can make use of."""
    from synthetic_counts import zipf_documents

    from paceline.workloads.topics.counts.matrices import to_dense

    documents = 100 if quick else STREAM_POOL
    counts = zipf_documents(documents, STREAM_TERMS, STREAM_K, STREAM_WORDS, seed=1)[0]
    return np.minimum(to_dense(counts.values, STREAM_TERMS), 255).astype(np.uint8)


def write_npy(path: Path, pool: np.ndarray, documents: int, kind: str) -> None:
    """Block after block; on the disk when it returns, so that the page cache can let go of it."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (documents, pool.shape[1])})
        for first in range(0, documents, 500):
            at = np.arange(first, min(documents, first + 500)) % len(pool)
            pool[at].astype(kind).tofile(file)
        file.flush()
        os.fsync(file.fileno())


def measured(source: Path, files: list[Path], options: argparse.Namespace) -> tuple[list[str], float]:
    """A row of the table and the passes per second. Passes and plain reads take turns: disks have moods."""
    total = sum(path.stat().st_size for path in files)
    found = apart(["--fit-alone", json.dumps([str(source), [str(path) for path in files], options.threads])])
    read_s, pass_s, memory = found["read_s"], found["pass_s"], found["peak_bytes"]
    rate, plain = total / pass_s, total / read_s
    numbers = [total / 1e9, plain / 1e9, pass_s, rate / 1e9]
    row = [*(f"{number:.2f}" for number in numbers), f"{100 * rate / plain:.0f} %"]
    return [*row, f"{memory / 1e9:.2f}", f"{found['start_s']:.1f}"], 1 / pass_s


def plain_read_s(files: list[Path]) -> float:
    """Seconds to read files from the disk, from their first byte to their last."""
    room = bytearray(READ_BYTES)
    forget(files)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(room):
                pass
    return time.perf_counter() - began


def forget(files: list[Path]) -> None:
    """Let the page cache drop them; they were written out before."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def fit_alone(request: str) -> None:
    """In a process of its own: a few passes, each with an empty page cache but for the first, which is not counted."""
    import torch

    from paceline.topics import fit

    source, files, threads = json.loads(request)
    paths = [Path(path) for path in files]
    torch.set_num_threads(threads)
    warm_up()
    taken: list[float] = []
    ended: list[float] = []
    read: list[float] = []

    def note(_: Any, turn: Any) -> None:
        ended.append(time.perf_counter())
        taken.append(turn.step_s)
        read.append(plain_read_s(paths))
        forget(paths)

    forget(paths)
    began = time.perf_counter()
    fit(source, STREAM_K, device="cpu", passes=STREAM_PASSES, progress=note)
    start_s = ended[0] - began - taken[0]
    times = {"pass_s": statistics.median(taken[1:]), "read_s": statistics.median(read)}
    print(json.dumps({**times, "start_s": start_s, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """Peak resident memory of this process. What getrusage says may be that of the parent when this one was started."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(words: list[str], before: tuple[str, ...] = ()) -> dict[str, Any]:
    """The last line that this script prints in a process of its own."""
    command = [*before, sys.executable, __file__, *words]
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a network of its own knows no names, which torch tells
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=quiet).stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# ---- scaling ---------------------------------------------------------------------------------------------------------


def scaling(options: argparse.Namespace) -> None:
    say("\nTwo ranks of one thread (joint) against two independent one-thread fits of half the documents each")
    if CORES < 2:
        say("  left out: this needs two cores")
        return
    with tempfile.TemporaryDirectory(prefix="paceline-topics-", dir=options.scratch) as scratch:
        rows = []
        for name, X, k in scaling_problems(options):
            folder = Path(scratch) / name.replace(" ", "_")
            folder.mkdir()
            paths = write_halves(folder, X)
            rounds = [joint_and_apart(paths, k, folder, options) for _ in range(options.repeats)]
            ratio = statistics.median(joint / alone for joint, alone in rounds)
            joint, alone = (statistics.median(rates) for rates in zip(*rounds, strict=True))
            sent, where = bytes_per_pass(paths[0], k, folder)
            expected = expected_bytes(k, X.shape[1], 2)
            shape = f"{name}, {X.shape[0]:,} x {X.shape[1]:,}, k = {k}"
            numbers = [f"{alone:,.0f}", f"{joint:,.0f}", f"{100 * ratio:.1f} %"]
            rows.append([shape, *numbers, f"{sent:,.0f}", f"{expected:,.0f}", f"{sent / expected:.4f}"])
        head = (
            "problem",
            "apart, docs/s",
            "joint, docs/s",
            "ratio",
            "bytes per pass and rank",
            "4km 2(N-1)/N",
            "ratio",
        )
        say(table(head, rows))
        say(f"  asked: 95 %; bytes sent: {where}, TCP headers included")


def scaling_problems(options: argparse.Namespace) -> Iterator[tuple[str, Any, int]]:
    import scipy.sparse
    from synthetic_counts import zipf_documents

    n, m = (2_000, 2_000) if options.quick else (100_000, 20_000)
    values = zipf_documents(n, m, 20, seed=2)[0].values
    yield "generated text", scipy.sparse.csr_array((values.data, values.indices, values.indptr), shape=(n, m)), 20
    path = options.data / "newsgroups_counts" / "counts_csr.npz"
    if path.is_file() and not options.quick:
        yield "20 newsgroups", scipy.sparse.csr_array(scipy.sparse.load_npz(path)), 20


def write_halves(folder: Path, X: Any) -> list[Path]:
    """All documents, the first half, the second half."""
    import scipy.sparse

    middle = X.shape[0] // 2
    paths = [folder / f"{name}.npz" for name in ("all", "first", "second")]
    for path, part in zip(paths, (X, X[:middle], X[middle:]), strict=True):
        scipy.sparse.save_npz(path, part, compressed=False)
    return paths


def joint_and_apart(paths: list[Path], k: int, folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Documents per second of both, one after the other."""
    passes = 12 if options.quick else 100
    joint = train_together([(paths[0], 2)], k, passes, folder)
    alone = train_together([(path, 1) for path in paths[1:]], k, passes, folder)
    return joint, alone


def train_together(runs: list[tuple[Path, int]], k: int, passes: int, folder: Path) -> float:
    """Sum of the rates of some runs, (counts, ranks), started at once; each is a median over its passes."""
    from paceline.io.files import read_json

    started = []
    for counts, ranks in runs:
        out = Path(tempfile.mkdtemp(dir=folder))
        run_file = write_run_file(out, counts, k, passes, ranks)
        command = [sys.executable, "-m", "paceline", "train", str(run_file), "--quiet", "--out", str(out)]
        started.append((out, subprocess.Popen(command)))
    for _, process in started:
        if process.wait() != 0:
            raise SystemExit("scaling: a run failed; what it said is above")
    return sum(float(read_json(next(out.glob("*/summary.json")))["samples_per_s"]) for out, _ in started)


def write_run_file(folder: Path, counts: Path, k: int, passes: int, ranks: int) -> Path:
    """A run of exactly so many passes. JSON is YAML too."""
    values = {
        "name": "topics",
        "workload": "topics",
        "model": {"k": k, "start": "random", "tolerance": 0.0},
        "data": {"path": str(counts)},
        "train": {"steps": passes, "checkpoint_every": 1 << 20},
        "parallel": {"ranks": ranks, "threads": 1, "device": "cpu"},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def expected_bytes(k: int, terms: int, ranks: int) -> float:
    """What a rank sends to add up the float32 statistic of k topics by so many terms: a ring, or anything as good."""
    return 4 * k * terms * 2 * (ranks - 1) / ranks


def bytes_per_pass(counts: Path, k: int, folder: Path) -> tuple[float, str]:
    """What a rank of two sends in a pass, by the kernel's counter: the difference of a long run and a short one."""
    request = ["--count-bytes", json.dumps([str(counts), k, str(folder)])]
    private = ("unshare", "--net")
    if shutil.which("unshare") and subprocess.run([*private, "true"], stderr=subprocess.DEVNULL).returncode == 0:
        found, where = apart(request, private), "loopback of a network of its own"
    else:
        found, where = apart(request), "all of this machine's loopback (root is needed for a network of its own)"
    return (found["many"] - found["few"]) / (MANY - FEW) / 2, where


def count_bytes(request: str) -> None:
    counts, k, folder = json.loads(request)
    if not loopback_up():
        raise SystemExit("scaling: the loopback interface could not be switched on")
    found = {}
    for name, passes in (("few", FEW), ("many", MANY)):
        before = loopback_bytes(Path("/proc/net/dev").read_text(encoding="ascii"))
        train_together([(Path(counts), 2)], k, passes, Path(folder))
        found[name] = loopback_bytes(Path("/proc/net/dev").read_text(encoding="ascii")) - before
    print(json.dumps(found))


def loopback_bytes(table: str) -> int:
    """Bytes sent over loopback, from /proc/net/dev."""
    line = next(line for line in table.splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":", 1)[1].split()[8])


def loopback_up() -> bool:
    """Switch it on, as a new network has it off."""
    import fcntl

    read_flags, set_flags, up = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, read_flags, struct.pack("16sh22x", b"lo", 0))
        flags = struct.unpack("16sh22x", answer)[1]
        if not flags & up:
            try:
                fcntl.ioctl(control, set_flags, struct.pack("16sh22x", b"lo", flags | up))
            except OSError:
                return False
    return True


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("data", nargs="?", type=Path, default=default, help="folder of the corpora")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, divided by commas")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all of it runs, and nothing else")
    parser.add_argument("--epochs", type=int, help="of tinytopics (200)")
    parser.add_argument("--newsgroups-epochs", type=int, help="of tinytopics on 20 newsgroups, where one takes 20 s")
    parser.add_argument("--iterations", type=int, help="of scikit-learn (200)")
    parser.add_argument("--repeats", type=int, help="fits of ours, and rounds of scaling; medians are shown (3)")
    parser.add_argument("--threads", type=int, default=CORES, help="of every program in the race (all cores)")
    parser.add_argument("--cache", type=Path, help="JSON file that keeps results of peers")
    parser.add_argument("--gigabytes", type=float, help="size of the float32 .npy (4)")
    parser.add_argument("--scratch", type=Path, help="folder for large files, on the disk to be measured")
    parser.add_argument("--fit-alone", help=argparse.SUPPRESS)
    parser.add_argument("--count-bytes", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    usual = {"epochs": 200, "iterations": 200, "repeats": 3, "gigabytes": 4.0}
    quick = {"epochs": 2, "iterations": 5, "repeats": 1, "gigabytes": 0.02}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = parse()
    if options.fit_alone:
        return fit_alone(options.fit_alone)
    if options.count_bytes:
        return count_bytes(options.count_bytes)
    if options.quick:
        say("quick: tiny sizes and few rounds; no number below means anything")
    sections = {"race": race, "stream": stream, "scaling": scaling}
    for name in SECTIONS:
        if name in options.only:
            if name != "race" and (note := busy_note()):
                say(f"\n{name}: {note}")
            sections[name](options)
    return None


if __name__ == "__main__":
    main()
