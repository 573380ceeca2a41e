"""All that can be shown on a machine with several GPUs, as one page: parity, scaling, overlap, the plan, topics.

    python benchmarks/several_gpus.py [--ranks 2,4] [--out several_gpus] [--steps 40] [--repeats 3]
    python benchmarks/several_gpus.py --share 2      # ranks that share one GPU: right, but no faster
    python benchmarks/several_gpus.py --cpu 2        # to try the program on cores, with tiny models

Every ratio is of runs that took turns within this one program. `--out` gets page.html, evidence.json, and the measured
runs. Exit code 1 if an answer depends on the layout or a part failed. Texts are the pages of this repository.
"""

from __future__ import annotations

import argparse
import html
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from paceline import check, doctor, measure, report, train
from paceline.config import RunSpec, build_spec
from paceline.io.files import write_atomic, write_json
from paceline.io.format import number, percent
from paceline.measurement.links import measure_links
from paceline.measurement.rows import MeasuredRow, drop_failed
from paceline.runlog.events import read_steps
from paceline.runlog.machine import describe_environment
from paceline.runlog.run_dir import RunDir

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = {"preset": "custom", "width": 64, "heads": 4, "kv_heads": 2, "layers": 4, "ffn": 128, "tied": False}
MEDIUM = {"preset": "custom", "width": 1024, "heads": 16, "kv_heads": 16, "layers": 12, "ffn": 2816, "tied": False}
TO_DO = ("wrong", "look")
PARITY_STEPS = 10
TOPICS_STEPS = 40
TOPICS_SAME = 1e-3
"""Relative, of the loss after every pass, in fp32."""
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid #ddd}
.wrong{color:#b00020;font-weight:600}iframe{width:100%;height:60rem;border:1px solid #ddd}"""


@dataclass
class Part:
    """A section of the page."""

    title: str
    says: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    holds: bool = True
    figures: dict[str, Any] = field(default_factory=dict)
    """For evidence.json."""


@dataclass(frozen=True)
class Asked:
    ranks: list[int]
    kind: str
    share: bool
    out: Path
    steps: int
    repeats: int

    @property
    def most(self) -> int:
        return self.ranks[-1]

    @property
    def parallel(self) -> dict[str, Any]:
        shared = {"backend": "gloo"} if self.share else {}
        threads = {"threads": 1} if self.kind == "cpu" else {}
        return {"device": self.kind, "timeout_s": 120.0, **shared, **threads}

    def lm(self, model: dict[str, Any], sequence: int, batch: int, **train_values: Any) -> RunSpec:
        data = {"source": "text", "path": str(REPOSITORY / "docs"), "sequence": sequence, "vocab": 512}
        values = {"steps": self.steps, "global_batch": batch, "lr": 1e-3, "log_every": 1, **train_values}
        return build_spec(
            {
                "name": "several",
                "workload": "lm",
                "model": model,
                "data": data,
                "train": values,
                "parallel": self.parallel,
            }
        )


def machine(asked: Asked) -> Part:
    found = doctor(out=asked.out)
    rows = [
        (one.verdict.value, f"{one.topic}: {one.check}", one.found, one.remedy * (one.verdict in TO_DO))
        for one in found.findings
    ]
    return Part("The machine", [], ("", "check", "found", "to do"), rows, figures=found.as_json())


def parity(asked: Asked) -> Part:
    """Promise 1: one rank and every layout of as many ranks as there are, in fp32 and not compiled."""
    n = asked.most
    layouts = ["single", *(f"{name}:{n}" for name in ("ddp", "zero1", "zero2", "fsdp")), "tensor:2", "pipeline:2:1f1b"]
    left_out = {
        "tensor:2+sequence": "ranks that share a device cannot" if asked.share else "",
        "pipeline:2:zero_bubble": "this torch cannot" if torch.__version__ < "2.13" else "",
    }
    layouts += [name for name, why in left_out.items() if not why]
    layouts += [f"hsdp:2x{n // 2}", f"fsdp:{n // 2}+tensor:2", f"fsdp:{n // 2}+pipeline:2"] if n >= 4 else []
    spec = asked.lm(TINY, 64, 8 * n, compile="off", precision="fp32", evaluate_on=8)
    found = check(spec, steps=PARITY_STEPS, layouts=layouts, log=say)
    rows = [
        (
            row.name,
            str(row.ranks),
            f"{row.loss:.1e}",
            f"{row.grad_norm or 0:.1e}",
            f"{row.weights:.1e}",
            row.worst.where,
        )
        for row in found.rows
    ]
    worst = max(max(row.loss, row.grad_norm or 0.0, row.weights, row.evaluation) for row in found.rows)
    word = "the same" if found.holds else "NOT the same"
    told = f"The answer is {word} on {len(rows)} layouts: at most {worst:.1e} apart, {found.tolerance:g} allowed."
    missing = [f"{name} is left out: {why}." for name, why in left_out.items() if why]
    columns = ("layout", "ranks", "loss", "gradient norm", "weights", "largest in")
    figures = {"largest": worst, "tolerance": found.tolerance, "rows": [asdict(row) for row in found.rows]}
    return Part("Parity", [told, *missing, *found.causes], columns, rows, found.holds, figures)


def scaling(asked: Asked) -> Part:
    """One rank and many in turns: speed-up, what communication costs, and what the plan said of it."""
    if asked.kind == "cpu":
        spec = asked.lm(TINY, 64, 4 * asked.most)
    else:
        spec = asked.lm(MEDIUM, 1024, 8 * asked.most, precision="bf16")
    layouts = [f"{name}:{asked.most}" for name in ("zero1", "fsdp")] + ["tensor:2"]
    folder = asked.out / "scaling"
    found = measure(
        spec, [1, *asked.ranks], layouts=layouts, repeats=asked.repeats, steps=asked.steps, out=folder, log=say
    )
    planned = {plan.label: plan for plan in found.planned}
    rows = []
    for row in drop_failed(found.rows):
        assert isinstance(row, MeasuredRow)
        parts, plan = row.parts, planned.get(row.label)
        hidden = percent(1 - parts.exposed_s / parts.comm_s) if parts.comm_s else "-"
        ratio = number(row.step_s / plan.step_s, 3) if plan else "-"
        times = [f"{number(value * 1e3, 3)} ms" for value in (row.step_s, parts.comm_s, parts.exposed_s)]
        rows.append((row.label, times[0], f"{row.speedup:.2f}×", percent(row.efficiency), *times[1:], hidden, ratio))
    failed = [f"{row.label}: {row.why or row.failed}" for row in found.rows if not isinstance(row, MeasuredRow)]
    report([folder], asked.out / "report", title="Scaling")
    columns = ("layout", "step", "speed-up", "efficiency", "in flight", "exposed", "hidden", "measured / planned")
    caution = [
        "Ranks share a device, so speed-ups and the plan, which counts a device for each, are no measure of several."
    ]
    says = [*caution * asked.share, *found.verdict, *found.notes, *failed]
    return Part("Scaling, overlap, plan", says, columns, rows, not failed, found.to_json())


def links(asked: Asked) -> Part:
    found = measure_links(asked.most)
    rows = [(link.name, link.between, link.rate, f"{number(link.latency_s * 1e6, 3)} µs") for link in found]
    note = ["Between processes on cores: devices that are shared have no link between them."] * (
        asked.kind == "cpu" or asked.share
    )
    figures = {"links": [asdict(link) for link in found]}
    return Part("Links", note, ("collective", "between", "bandwidth", "latency"), rows, figures=figures)


def topics(asked: Asked) -> Part:
    """A fit by passes: the same losses, and how much faster."""
    import numpy as np
    from synthetic_counts import generate_synthetic_data

    size = {"n": 300, "m": 120, "k": 4} if asked.kind == "cpu" else {"n": 20_000, "m": 5_000, "k": 20}
    counts, _, _ = generate_synthetic_data(**size, avg_doc_length=60, seed=0, sparse=False)
    file = asked.out / "counts.npy"
    np.save(file, np.asarray(counts))
    losses, seconds, rows = {}, {}, []
    for ranks in (1, *asked.ranks):
        values = {
            "name": f"topics-{ranks}",
            "workload": "topics",
            "model": {"k": size["k"], "tolerance": 0},
            "data": {"path": str(file)},
            "train": {"steps": TOPICS_STEPS},
            "parallel": {"ranks": ranks, **asked.parallel},
        }
        say(f"topics on {ranks}")
        steps = read_steps(RunDir(train(build_spec(values), asked.out / "topics", show=False).path).events_file(0))
        losses[ranks] = [step["loss"] for step in steps]
        seconds[ranks] = sorted(step["step_s"] for step in steps)[len(steps) // 2]
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses[ranks], losses[1], strict=True))
        rows.append(
            (str(ranks), f"{apart:.1e}", f"{number(seconds[ranks] * 1e3, 3)} ms", f"{seconds[1] / seconds[ranks]:.2f}×")
        )
    worst = max(float(row[1]) for row in rows)
    told = f"{size['n']:,} documents of {size['m']:,} words, {size['k']} topics: losses at most {worst:.1e} apart."
    columns = ("ranks", "largest difference of the loss", "pass", "speed-up")
    return Part("Topics", [told], columns, rows, worst < TOPICS_SAME, {"largest": worst, "pass_s": seconds})


PARTS: dict[str, Callable[[Asked], Part]] = {
    "machine": machine,
    "parity": parity,
    "scaling": scaling,
    "links": links,
    "topics": topics,
}


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def carried_out(name: str, asked: Asked) -> Part:
    """What fails is a part of the page as well: the others are shown all the same."""
    began = time.perf_counter()
    print(f"{name} …", flush=True)
    try:
        part = PARTS[name](asked)
    except Exception as error:
        traceback.print_exc()
        part = Part(name.capitalize(), [f"FAILED: {error}"], holds=False)
    for line in part.says:
        print(f"  {line}")
    for row in [part.columns, *part.rows] if part.rows and name != "machine" else []:
        print("  " + " ".join(f"{cell:<23}" for cell in row).rstrip())
    print(f"  {time.perf_counter() - began:.0f} s", flush=True)
    return part


def page(parts: Sequence[Part], asked: Asked) -> str:
    here = describe_environment()
    devices = ", ".join(here["gpus"]) or f"{here['cores']} cores of {here['cpu']}"
    shared = f", shared by {asked.most} ranks" if asked.share else ""
    body = [f"<h1>Several ranks on {html.escape(devices + shared)}</h1>"]
    versions = ", ".join(f"{name} {here[name]}" for name in ("paceline", "torch", "python"))
    body.append(f"<p>{html.escape(versions)}; {time.strftime('%Y-%m-%d %H:%M')}</p>")
    for part in parts:
        body.append(f"<h2{'' if part.holds else ' class=wrong'}>{html.escape(part.title)}</h2>")
        body += [f"<p>{html.escape(line)}</p>" for line in part.says]
        if part.rows:
            head = "".join(f"<th>{html.escape(name)}</th>" for name in part.columns)
            cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in part.rows]
            body.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    if (inside := asked.out / "report" / "report.html").is_file():
        body.append(f'<h2>The report of the scaling</h2><iframe srcdoc="{html.escape(inside.read_text())}"></iframe>')
    return f"<!doctype html><meta charset=utf-8><title>Several ranks</title><style>{STYLE}</style>{''.join(body)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="", metavar="2,4", help="numbers of ranks (2 and all devices)")
    parser.add_argument("--share", type=int, default=0, metavar="N", help="so many ranks share the devices")
    parser.add_argument("--cpu", type=int, default=0, metavar="N", help="so many ranks on cores")
    parser.add_argument("--out", type=Path, default=Path("several_gpus"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    words = parser.parse_args()
    import torch

    most = words.cpu or words.share or torch.cuda.device_count()
    if most < 2:
        raise SystemExit(f"this needs two GPUs, and torch sees {most}; try  --share 2  or  --cpu 2")
    ranks = sorted({int(n) for n in words.ranks.split(",")} if words.ranks else {2, most})
    kind, share = ("cpu", False) if words.cpu else ("cuda", bool(words.share))
    words.out.mkdir(parents=True, exist_ok=True)
    asked = Asked(ranks, kind, share, words.out.resolve(), words.steps, words.repeats)
    parts = [carried_out(name, asked) for name in words.parts.split(",")]
    write_json(asked.out / "evidence.json", {part.title: {"holds": part.holds, **part.figures} for part in parts})
    write_atomic(asked.out / "page.html", page(parts, asked))
    print(f"written: {asked.out / 'page.html'}")
    return 0 if all(part.holds for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
