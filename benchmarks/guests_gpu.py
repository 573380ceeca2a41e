"""Models of others on one CUDA device: Paceline against what people use for them, from the same weights and batches.

    python benchmarks/guests_gpu.py [ROW …] [--steps 100] [--out FILE.json] [--rivals all|first|none] [--tiny]

Models of the library transformers run under its Trainer (with PEFT for adapters), and the Trainer with torch.compile;
modules of our own in an eager loop and in one with torch.compile, both with their data on the device. A row has ms per
step, the peak of memory, seconds from the start to the end of the first steps, and losses. `--tiny` tries the program
on CPU cores with models of no size. `qlora` is a llama of 7 B parameters in 4 bits under adapters, with one sample a
pass, as a card of 24 GB takes it, and has no rival here. It needs transformers, accelerate and, for `lora`, peft.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import guest_modules
import numpy as np
import torch
from torch import Tensor

import paceline
from paceline.config import RunSpec, build_spec
from paceline.data.order import Order
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

CUDA = torch.cuda.is_available()
GIB = float(1 << 30)
WARM, WINDOW = 0.4, 5
"""Share of the steps that warm up; steps between two readings of the clock."""
LR, BETAS = 1e-4, (0.9, 0.999)
LORA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA = {"vocab_size": 30_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048, "pad_token_id": 0}
BERT = {"vocab_size": 30_000, "num_labels": 4, "pad_token_id": 0}
SEVEN = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_key_value_heads": 32}
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODULES = {"resnet": "ResNet50", "vit": "VisionTransformer", "conv1d": "GatedConvolutions", "lstm": "NextWord"}
GUESTS = ("bert", "llama", "lora", "qlora")
ADAPTED = ("lora", "qlora")
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=[*GUESTS, *MODULES], metavar="ROW")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rivals", choices=("all", "first", "none"), default="all")
    parser.add_argument("--ways", default="", help="only those whose name matches")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no way of a row after these")
    arguments = parser.parse_args()
    started = time.monotonic()
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{name}, torch {torch.__version__}, {arguments.steps} steps", flush=True)
    found: dict[str, dict[str, Result]] = {}
    for row in arguments.rows:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            found[row] = {}
            try:
                ways = list(guest_ways(row, Path(folder), arguments) if row in GUESTS else module_ways(row, arguments))
            except Exception:
                traceback.print_exc()
                continue
            for way, run in ((way, run) for way, run in ways if re.search(arguments.ways, way)):
                if time.monotonic() - started > arguments.seconds:
                    print(f"{row:7s} {way:18s} not begun after {arguments.seconds:.0f} s", flush=True)
                    continue
                found[row][way] = measured(run)
                print(show(row, way, found[row]), flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(found, indent=1))


def measured(run: Callable[[], Result]) -> Result:
    gc.collect()
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        result = run()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    return {"peak_gib": round(peak / GIB, 2), "whole_s": round(time.perf_counter() - began, 1), **result}


def show(row: str, way: str, found: dict[str, Result]) -> str:
    result = found[way]
    if "error" in result:
        return f"{row:7s} {way:18s} {result['error']}"
    ratio = next(iter(found.values())).get("step_ms", math.nan) / result["step_ms"]
    losses = " ".join(f"{result['losses'][i]:.4f}" for i in (0, len(result["losses"]) // 2, -1))
    text = f"{row:7s} {way:18s} {result['step_ms']:8.2f} ms {ratio:5.2f}x {result['peak_gib']:7.2f} GiB"
    text += f" {result['whole_s']:6.1f} s  losses {losses}"
    if "said" not in result:
        return text
    plan = result["planned"]
    if "error" in plan:
        text += f"  not planned: {plan['error']}"
    else:
        off = (plan["step_ms"] / result["step_ms"] - 1, plan["memory_gib"] / (result["peak_gib"] or math.nan) - 1)
        text += f"  planned {plan['step_ms']:.2f} ms {off[0]:+.1%}, {plan['memory_gib']:.2f} GiB {off[1]:+.1%}"
    return "\n".join((text, *(f"    {line}" for line in (result["said"], *result["notices"]))))


def summarise(marks: list[float], losses: list[float], began: float) -> Result:
    """Of the clock after every `WINDOW` steps: the median of the later steps."""
    each = [(b - a) / WINDOW * 1e3 for a, b in pairwise(marks)]
    late = each[int(WARM * len(each)) :] or [math.nan]
    return {"step_ms": statistics.median(late), "first_s": round(marks[0] - began, 1), "losses": losses}


def by_paceline(spec: RunSpec, show: bool = False) -> Result:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as out:
        result = paceline.train(spec, out, show=show)
        run = RunDir(result.path)
        file = run.events_file(0)
        steps = list(read_steps(file))
        said = [event["execution"] for event in read_events(file, "start")]
        notices = [event["text"] for event in read_events(file, "notice")]
    late = [step["step_s"] * 1e3 for step in steps[int(WARM * len(steps)) :]]
    waited = statistics.median(step["data_s"] for step in steps) * 1e3
    found = {"step_ms": statistics.median(late), "losses": [step["loss"] for step in steps], "said": said[-1]}
    return {**found, "data_ms": waited, "notices": notices, "planned": planned(spec)}


def planned(spec: RunSpec) -> Result:
    """Price the same layout on a catalogue device of the same kind."""
    try:
        plan = paceline.plan(spec, cluster="1xH200", devices=[1])
        price = next(row.price for row in plan.rows if getattr(row, "price", None))
        return {"step_ms": price.step_s * 1e3, "memory_gib": price.memory.allocated_bytes / GIB}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def train_section(batch: int, steps: int) -> dict[str, Any]:
    values = {"steps": steps, "global_batch": batch, "precision": "bf16", "schedule": "constant", "warmup": 0}
    return {**values, "lr": LR, "weight_decay": 0, "clip": 1.0, "log_every": WINDOW, "checkpoint_every": 1 << 20}


def parallel_section() -> dict[str, Any]:
    return {"device": "cuda" if CUDA else "cpu"}


# ── models of the library transformers


def guest_ways(row: str, folder: Path, arguments: Any) -> Iterator[tuple[str, Callable[[], Result]]]:
    spec, batches = write_guest(row, folder, arguments.steps, arguments.tiny)
    model = folder / "model"
    if arguments.rivals != "none" and row != "qlora":
        yield "Trainer", lambda: by_trainer(row, model, batches, False)
    if arguments.rivals == "all" and row in ("llama", "lora"):  # every length is compiled anew: over 110 s
        yield "Trainer, compiled", lambda: by_trainer(row, model, batches, True)
    if row == "qlora":
        yield "Paceline", lambda: by_paceline(spec.replace({"train.compile": "off", "parallel.micro_batch": 1}), True)
        return
    yield "Paceline, auto", lambda: by_paceline(spec)
    yield "Paceline, on", lambda: by_paceline(spec.replace({"train.compile": "on"}))


def write_guest(row: str, folder: Path, steps: int, tiny: bool) -> tuple[RunSpec, Callable[[], Any]]:
    """Write weights, tokeniser and texts of random words; return the spec, and the batches that it reads."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab, batch, length = (
        (300, 8, 32) if tiny else (30_000, 64 if row == "bert" else 8, 128 if row == "bert" else 1024)
    )
    words = {"[PAD]": 0, "[UNK]": 1, "<|endoftext|>": 2, **{f"w{i}": i for i in range(3, vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = folder / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        if row == "bert":
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            sizes = {**BERT, **off, "max_position_embeddings": 512, **(TINY if tiny else {}), "vocab_size": vocab}
            made: Any = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
        else:
            sizes = LLAMA | (SEVEN if row == "qlora" else {})
            sizes |= {**({**TINY, "hidden_size": 64, "num_key_value_heads": 2} if tiny else {}), "vocab_size": vocab}
            made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    (made.bfloat16() if row in ADAPTED else made).save_pretrained(model)
    del made
    draw = np.random.default_rng(0)
    data: dict[str, Any] = {"cache": str(folder / "cache")}
    if row == "bert":
        lengths = np.clip(draw.lognormal(math.log(48 if not tiny else 12), 0.4, batch * steps), 8, length).astype(int)
        texts = [draw.integers(3, vocab, n) for n in lengths]
        labels = draw.integers(0, 4, len(texts))
        lines = [f"{' '.join(f'w{i}' for i in text)},c{label}" for text, label in zip(texts, labels, strict=True)]
        (folder / "texts.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
        data |= {"source": "csv", "path": str(folder / "texts.csv"), "max_length": length, "test_fraction": 0.01}
    else:
        ids = draw.integers(3, vocab, batch * steps * length * 12 // 10)
        documents = [" ".join(f"w{i}" for i in part) for part in np.array_split(ids, 10)]
        (folder / "texts").mkdir()
        for number, document in enumerate(documents):
            (folder / "texts" / f"{number}.txt").write_text(document)
        data |= {"source": "text", "path": str(folder / "texts"), "sequence": length, "test_fraction": 0.1}
    task = "sequence_classification" if row == "bert" else "causal_lm"
    section = {"init_from": str(model), "task": task, "match": "all"}
    section |= {"lora_rank": 16, "lora_alpha": 16} if row in ADAPTED else {}
    section |= {"quantize": "nf4"} if row == "qlora" else {}
    values = {"workload": "transformers", "model": section, "data": data, "parallel": parallel_section()}
    spec = build_spec({"name": row, **values, "train": train_section(batch, steps)})

    def batches() -> list[Any]:
        workload = build_workload(spec)
        workload.prepare(lambda line: None)
        samples = workload.data("train")
        order = Order.of(spec.train, len(samples))
        return [samples.batch(one.ids, one.keys) for one in order.global_batches(0, steps)]

    return spec, batches


def by_trainer(row: str, model: Path, batches: Callable[[], list[Any]], compiles: bool) -> Result:
    """The library's Trainer, as its examples use it, with the batches of the run in their order."""
    import transformers

    auto = "AutoModelForSequenceClassification" if row == "bert" else "AutoModelForCausalLM"
    net = getattr(transformers, auto).from_pretrained(model, dtype="auto")
    if row == "lora":
        import peft

        net = peft.get_peft_model(net, peft.LoraConfig(r=16, lora_alpha=16, target_modules=LORA))
    elif net.dtype != torch.float32:
        net = net.float()
    made = batches()
    each = made[0].labels.shape[0]
    rows: list[dict[str, Any]] = []
    for batch in made:
        for i in range(len(batch.labels)):
            if row == "bert":
                shown = int(batch.inputs["attention_mask"][i].sum())
                rows.append(
                    {"input_ids": batch.inputs["input_ids"][i, :shown].tolist(), "labels": int(batch.labels[i])}
                )
            else:
                targets = batch.labels[i].tolist()
                tokens = batch.inputs["input_ids"][i].tolist()
                rows.append({"input_ids": tokens, "labels": targets, "shift_labels": targets})

    def collate(some: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(one["input_ids"]) for one in some)
        ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in some])
        more = {} if row != "bert" else {"attention_mask": (ids != 0).long()}
        rest = {key: torch.tensor([one[key] for one in some]) for key in some[0] if key != "input_ids"}
        return {"input_ids": ids, **more, **rest}

    losses: list[Tensor] = []
    marks: list[float] = []

    class Watched(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if len(losses) % WINDOW == 0 and losses:
                float(losses[-1])
                marks.append(time.perf_counter())
            losses.append(super().training_step(*args, **kwargs).detach())
            return losses[-1]

    with tempfile.TemporaryDirectory() as out:
        options = transformers.TrainingArguments(
            out,
            per_device_train_batch_size=each,
            max_steps=len(made),
            learning_rate=LR,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            bf16=True,
            optim="adamw_torch_fused" if CUDA else "adamw_torch",
            dataloader_num_workers=4 if CUDA else 0,
            remove_unused_columns=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1_000_000,
            torch_compile=compiles,
            use_cpu=not CUDA,
            disable_tqdm=True,
        )
        trainer = Watched(net, options, train_dataset=rows, data_collator=collate)
        began = time.perf_counter()
        trainer.train()
    return summarise(marks, [float(loss) for loss in losses], began)


# ── modules of our own


def module_ways(row: str, arguments: Any) -> Iterator[tuple[str, Callable[[], Result]]]:
    kind = MODULES[row]
    batch = getattr(guest_modules, kind).batch if not arguments.tiny else 4
    train = train_section(batch, arguments.steps)
    file = Path(guest_modules.__file__).resolve()
    values = {"name": row, "workload": f"{file}:{kind}", "train": train, "parallel": parallel_section()}
    spec = build_spec(values).replace({"train.batchnorm_group": "as_is"})  # the statistics of the other loops
    if arguments.rivals != "none":
        yield "eager loop", lambda: by_hand(spec, False)
    if arguments.rivals == "all" and row != "lstm":
        yield "compiled loop", lambda: by_hand(spec, True)
    yield "Paceline, auto", lambda: by_paceline(spec)
    if row != "lstm":
        yield "Paceline, on", lambda: by_paceline(spec.replace({"train.compile": "on"}))
    if row == "resnet":
        groups = spec.replace({"train.batchnorm_group": "auto"})
        yield "groups, auto", lambda: by_paceline(groups)
        yield "groups, on", lambda: by_paceline(groups.replace({"train.compile": "on"}))


def by_hand(spec: RunSpec, compiles: bool) -> Result:
    """A plain loop: autocast, fused AdamW, clipped gradients, the data on the device."""
    train, workload, device = spec.train, build_workload(spec), "cuda" if CUDA else "cpu"
    columns = [column.to(device) for column in workload.data("train")]
    torch.manual_seed(train.seed)
    model: Any = workload.model().to(device).train()
    if compiles:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    order, losses, marks = Order(len(columns[0]), train.global_batch, train.seed), list[Tensor](), list[float]()
    assert train.steps
    began = time.perf_counter()
    for batch in order.global_batches(0, train.steps):
        ids = torch.from_numpy(batch.ids).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            total, count = workload.loss(model, tuple(column[ids] for column in columns))
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if len(losses) % WINDOW == 0:
            float(losses[-1])
            marks.append(time.perf_counter())
    return summarise(marks, [float(one) for one in losses], began)


if __name__ == "__main__":
    main()
