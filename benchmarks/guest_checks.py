"""Prove that the answer of models of other people does not depend on the layout: `paceline check` for small ones.

    python benchmarks/guest_checks.py [NAME ...]

Prints the table of docs/check.md: the modules of guest_modules.py, and architectures of the library transformers with
random weights that are saved here and read as a user would. On CPU cores, ranks by gloo; about 5 s a row on idle ones.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import guest_modules

import paceline
from paceline.config import build_spec
from paceline.errors import PacelineError

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
    rows = list_rows()
    wanted = [name for name in rows if not sys.argv[1:] or name.startswith(tuple(sys.argv[1:]))]
    print("| model | largest difference of the loss | gradient norm | weights | |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        write_texts(Path(scratch))
        for name in wanted:
            spec = build_spec({"name": "guest", "parallel": {"threads": 1}, **rows[name](Path(scratch))})
            try:
                parity = paceline.check(spec, layouts=LAYOUTS, steps=STEPS)
            except PacelineError as error:
                print(f"| {name} | {str(error).splitlines()[0]} | | | ✗ |", flush=True)
                continue
            worst = [max(getattr(row, key) for row in parity.rows[1:]) for key in ("loss", "grad_norm", "weights")]
            said = " | ".join(f"{value:.1e}" for value in worst)
            print(f"| {name} | {said} | {'✓' if parity.holds else '✗'} |", flush=True)


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
