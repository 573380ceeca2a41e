"""Prove that the answer of models of other people does not depend on the layout: `paceline check` for small ones.

    python benchmarks/guest_checks.py [NAME ...]
    python benchmarks/guest_checks.py [NAME ...] --device cuda --launches 4 [--seconds 300] [--out FILE.json]

Prints the table of docs/check.md: the modules of guest_modules.py, and architectures of the library transformers with
random weights that are saved here and read as a user would. Ranks by gloo; on idle CPU cores about 5 s a row.

With `--launches` pairs of ranks stay and check one row after the other, several pairs at once, without TF32; on one
device all of them share it. What differs is computed again in fp64. A pair that dies is started again behind its row,
and says where it died. Some rows are checked with compiled blocks too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
import guest_modules

import paceline
from paceline.config import RunSpec, build_spec
from paceline.errors import PacelineError
from paceline.launch.local import PRELOAD, run_ranks
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import SHRINKS, TOLERANCE

guest_modules.TINY = True
LAYOUTS = ("single", "ddp:2", "fsdp:2")
STEPS = 4
WORDS = 120


class ResNet(guest_modules.ResNet50):
    pass


class Encoder(guest_modules.VisionTransformer):
    pass


class GatedConv1d(guest_modules.GatedConvolutions):
    pass


class LSTM(guest_modules.NextWord):
    pass


MODULES = {
    "ResNet of bottlenecks, batch norm": ResNet,
    "vision transformer of `nn.TransformerEncoder`": Encoder,
    "gated `nn.Conv1d`": GatedConv1d,
    "`nn.LSTM`": LSTM,
}
COMPILED = ("vision transformer of `nn.TransformerEncoder`", "llama", "llama, LoRA", "bert, classes")
SIDES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDES |= {"max_position_embeddings": 66, "pad_token_id": 0, "vocab_size": WORDS}
DECODER = {**SIDES, "bos_token_id": 3, "eos_token_id": 3}
GROUPED = {**DECODER, "num_key_value_heads": 2}
WIDE_HEADS, NARROW_TABLE = {**GROUPED, "head_dim": 8}, {**SIDES, "embedding_size": 16}
DEBERTA = {**SIDES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "mistral", "phi", "phi3", "olmo2", "stablelm", "starcoder2"), GROUPED),
    **dict.fromkeys(("qwen3", "gemma", "gemma2", "gemma3_text"), WIDE_HEADS),
    "gpt2": {**DECODER, "n_inner": 48, "n_positions": 66},
    "gpt_neo": {**DECODER, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_neox": DECODER,
    "opt": {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": DECODER,
    "falcon": DECODER,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mamba": {**DECODER, "state_size": 4},
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "mpnet"), SIDES),
    "distilbert": {**SIDES, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    **dict.fromkeys(("albert", "electra"), NARROW_TABLE),
    **dict.fromkeys(("deberta", "deberta-v2"), DEBERTA),
    "modernbert": {**DECODER, "cls_token_id": 1, "sep_token_id": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="how rows begin")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--launches", type=int, default=0, help="pairs of ranks that work at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="all pairs end after")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve_rows(asked.serve)
    rows = list_rows()
    wanted = [name for name in rows if not asked.names or name.startswith(tuple(asked.names))]
    print("| model | largest difference of the loss | gradient norm | weights | |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_texts(scratch)
        here = {"threads": 1, "device": asked.device, "timeout_s": 120}
        if asked.launches:
            sections = {name: rows[name](scratch) for name in wanted}
            for name in [name for name in wanted if name in COMPILED]:
                values = sections[name]
                sections[f"{name}, compiled"] = {**values, "train": {**values["train"], "compile": "on"}}
            specs = {name: {"parallel": {**here, "backend": "gloo"}, **values} for name, values in sections.items()}
            return check_in_pairs(specs, scratch, asked)
        for name in wanted:
            spec = build_spec({"name": "guest", "parallel": here, **rows[name](scratch)})
            try:
                parity = paceline.check(spec, layouts=LAYOUTS, steps=STEPS)
            except PacelineError as error:
                print(f"| {name} | {str(error).splitlines()[0]} | | | ✗ |", flush=True)
                continue
            print(show(name, {**find_worst(parity.rows), "holds": parity.holds}), flush=True)
    return None


def find_worst(rows: Any) -> dict[str, float]:
    return {key: max(getattr(row, key) or 0.0 for row in rows[1:]) for key in ("loss", "grad_norm", "weights")}


def show(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {name} | {row['error']} | | | ✗ |"
    said = " | ".join(f"{row[key]:.1e}" for key in ("loss", "grad_norm", "weights"))
    exact = f", {row['fp64']:.1e} in fp64" if "fp64" in row else ""
    return f"| {name} | {said}{exact} | {'✓' if row['holds'] else '✗'} |"


# ── pairs of ranks that check one row after the other


def check_in_pairs(specs: dict[str, Any], scratch: Path, asked: Any) -> None:
    """Divide the rows among pairs, each below a process of its own; print what they find as it comes."""
    began, found = time.monotonic(), dict[str, Any]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the pairs are ended below
    names = sorted(specs, key=lambda name: "compiled" not in name)  # the longest first
    folders, running = [], []
    for number in range(min(asked.launches, len(names))):
        folders.append(scratch / f"pair{number}")
        folders[-1].mkdir()
        mine = {name: specs[name] for name in names[number :: asked.launches]}
        (folders[-1] / "rows.json").write_text(json.dumps(mine))
        command = [sys.executable, __file__, "--serve", str(folders[-1])]
        log = (folders[-1] / "log").open("w")
        variables = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "PYTHONUNBUFFERED": "1"}
        running.append(subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True))
    try:
        while True:
            over = all(process.poll() is not None for process in running)
            for folder in folders:
                for name, row in read_found(folder).items():
                    if found.get(name) != row:
                        found[name] = row
                        print(show(name, row), flush=True)
            if over or time.monotonic() - began > asked.seconds:
                break
            time.sleep(0.2)
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for name in names:
        if name not in found:
            found[name] = {"error": f"not reached in {asked.seconds:.0f} s"}
            print(show(name, found[name]), flush=True)
    kept = sum(row.get("holds", False) for row in found.values())
    print(f"{kept} of {len(found)} hold, {time.monotonic() - began:.0f} s", flush=True)
    if kept < len(found):
        for folder in folders:
            text = (folder / "log").read_text()
            print(f"── {folder.name}\n{text[-6000:]}" if text.strip() else "", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))


def read_found(folder: Path) -> dict[str, Any]:
    file = folder / "found.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return {key: value for line in lines for key, value in json.loads(line).items()}


def add_found(folder: Path, name: str, row: dict[str, Any]) -> None:
    with (folder / "found.jsonl").open("a") as file:
        file.write(json.dumps({name: row}) + "\n")


def serve_rows(folder: Path) -> None:
    """Check the rows of a folder in launches of two ranks, first in fp32, then what differed in fp64."""
    import guest_checks  # its functions are found by this name in the ranks

    specs = {
        name: build_spec({"name": "guest", **values})
        for name, values in json.loads((folder / "rows.json").read_text()).items()
    }
    for precision in ("fp32", "fp64"):
        rows = dict(specs)
        if precision == "fp64":
            differing = {name for name, row in read_found(folder).items() if row.get("holds") is False}
            rows = {name: specs[name].replace({"train.precision": "fp64"}) for name in specs if name in differing}
        while rows:
            before = len(rows)
            try:
                work = (list(rows.items()), str(folder), precision)
                run_ranks(guest_checks.check_rows, work, 2, (*PRELOAD, "transformers"))
            except PacelineError as error:
                done = set((folder / f"done.{precision}").read_text().split("\n"))
                failed = next(name for name in rows if name not in done)
                add_found(folder, failed, {"error": f"{error}".splitlines()[0], "holds": None})
                print(f"{failed}: {error}", flush=True)
                rows = {name: spec for name, spec in rows.items() if name not in done and name != failed}
                if len(rows) < before:
                    continue
            break


def check_rows(rows: list[tuple[str, RunSpec]], folder: str, precision: str) -> None:
    """Be one of two ranks; the main one notes what it finds."""
    main, at = os.environ["RANK"] == "0", Path(folder)
    os.chdir(folder)
    done = at / f"done.{precision}"
    if main:
        done.touch()
    for number, (name, spec) in enumerate(rows):
        began, runs = time.monotonic(), at / f"{precision}-{number}-{os.environ['MASTER_PORT']}"
        parity = paceline.check(spec, layouts=LAYOUTS, steps=STEPS, out=runs)
        if not main:
            continue
        worst, largest = find_worst(parity.rows), max(row.worst.value for row in parity.rows[1:])
        row: dict[str, Any] = {
            **worst,
            "largest": largest,
            "holds": parity.holds,
            "seconds": round(time.monotonic() - began, 1),
        }
        if precision == "fp64":
            row = {**read_found(at)[name], "fp64": largest}
            row["holds"] = largest <= max(TOLERANCE["fp64"], row["largest"] * SHRINKS)
        events = [RunDir(path).events_file(0) for path in sorted(runs.iterdir()) if path.is_dir()]
        row["said"] = [event["execution"] for file in events for event in read_events(file, "start")]
        add_found(at, name, row)
        with done.open("a") as file:
            file.write(f"{name}\n")


def list_rows() -> dict[str, Any]:
    """Return what builds the sections of the run file of each row."""

    def describe_module(kind: str) -> Any:
        train = {"global_batch": 8, "lr": 1e-3}
        return lambda scratch: {"workload": f"{Path(__file__).resolve()}:{kind}", "train": train}

    rows = {name: describe_module(kind.__name__) for name, kind in MODULES.items()}
    rows["llama, LoRA"] = lambda scratch: describe_guest(scratch, "llama", "causal_lm", GROUPED, lora_rank=2)
    for task, kinds in (("causal_lm", CAUSAL), ("sequence_classification", CLASSIFIERS)):
        for kind, sides in kinds.items():
            label = kind if task == "causal_lm" else f"{kind}, classes"
            rows[label] = lambda scratch, one=(kind, task, sides): describe_guest(scratch, *one)
    return rows


def describe_guest(scratch: Path, kind: str, task: str, sides: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Save a model of the library with random weights; return the sections that fine-tune it."""
    import torch
    import transformers

    folder = scratch / f"{kind}-{task}"
    auto = transformers.AutoModelForCausalLM if task == "causal_lm" else transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    auto.from_config(transformers.CONFIG_MAPPING[kind](**sides)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((scratch / "tokenizer.json").read_bytes())
    texts = {"source": "text", "path": str(scratch / "texts.txt"), "sequence": 16}
    table = {"source": "csv", "path": str(scratch / "texts.csv"), "max_length": 24}
    data = {**(texts if task == "causal_lm" else table), "cache": str(scratch / "cache")}
    model = {"init_from": str(folder), "task": task, **more}
    # 7 samples are divided unevenly
    return {"workload": "transformers", "model": model, "data": data, "train": {"global_batch": 7, "lr": 1e-3}}


def write_texts(scratch: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[MASK]", "<|endoftext|>", *(f"w{n}" for n in range(4, WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(scratch / "tokenizer.json"))
    lines = [" ".join(f"w{4 + (n * m) % 113}" for m in range(3, 8 + n % 13)) for n in range(400)]
    (scratch / "texts.txt").write_text("\n".join(lines * 4))
    rows = (f"{line},c{n % 2}" for n, line in enumerate(lines))
    (scratch / "texts.csv").write_text("\n".join(["text,label", *rows]))


if __name__ == "__main__":
    main()
