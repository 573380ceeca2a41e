"""Tiny models of the library transformers, drawn and saved on the spot with a tokeniser of their own."""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

SIDES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 3}
LLAMA = {**SIDES, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {**SPECIAL, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {**SIDES, "pad_token_id": 0, "max_position_embeddings": 64}
DECODER = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
T5 = {**DECODER, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BART = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
BART |= {**DECODER, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2}
ROBERTA = {**BERT, "max_position_embeddings": 66}
VIT = {**SIDES, "image_size": 16, "patch_size": 4}
MIXTRAL = {**LLAMA, "num_local_experts": 4}
QWEN2_MOE = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2_MOE["shared_expert_intermediate_size"] = 24
DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
KINDS = {
    "deberta-v2": DEBERTA,
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "gpt2": GPT2,
    "bert": BERT,
    "t5": T5,
    "bart": BART,
    "roberta": ROBERTA,
    "vit": VIT,
}
CHATML = (
    "{% for m in messages %}[CLS]{{ m.role }}\n{{ m.content }}[SEP]\n{% endfor %}"
    "{% if add_generation_prompt %}[CLS]assistant\n{% endif %}"
)
TEXTS = [
    f"{word} number {i} of the list is {colour}"
    for i in range(40)
    for word, colour in (("good", "red"), ("bad", "blue"))
]


def save(kind: str, folder: Path, auto: str = "AutoModelForCausalLM", dtype: str = "float32", **changed) -> Path:
    import torch
    import transformers

    sizes = {} if kind == "vit" else {"vocab_size": save_tokenizer(folder).get_vocab_size()}
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[kind](**{**sizes, **KINDS[kind], **changed})
    getattr(transformers, auto).from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path):
    """A byte-level BPE that marks a text as BERT does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]", "<|endoftext|>", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def save_chat(folder: Path) -> Path:
    """A llama whose tokeniser has a chat template, and whose weights can be kept in 4 bits."""
    save("llama", folder, hidden_size=64)
    values = {"chat_template": CHATML, "eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def write_chats(file: Path, rows: int = 1000) -> Path:
    """Questions with one or two answers, which follow from the question."""
    with file.open("w") as out:
        for n in range(rows):
            more, less = max(n % 7, n % 5), min(n % 7, n % 5)
            said = [(f"{n % 7} number {n % 5}", f"good {more}"), ("list", f"bad {less}")][: 1 + (n % 3 == 0)]
            pairs = (zip(("user", "assistant"), texts, strict=True) for texts in said)
            out.write(json.dumps({"messages": [{"role": r, "content": c} for pair in pairs for r, c in pair]}) + "\n")
    return file


def labelled(file: Path) -> Path:
    file.write_text("text,label\n" + "".join(f"{text},{text.split()[0]}\n" for text in TEXTS))
    return file


def write_task_data(folder: Path) -> dict[str, dict]:
    """Data of each of the tasks, as sections of a run file."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    texts, pairs, tags = (folder / name for name in ("texts.txt", "pairs.jsonl", "tags.jsonl"))
    texts.write_text("\n".join(TEXTS * 40))
    short = [text.split()[:6] for text in TEXTS]
    pairs.write_text("".join(json.dumps({"text": t, "label": f"{t.split()[-1]} {t.split()[2]}"}) + "\n" for t in TEXTS))
    names = [["ADJ" if w in ("good", "bad") else "NUM" if w.isdigit() else "O" for w in words] for words in short]
    rows = zip(short, names, strict=True)
    tags.write_text("".join(json.dumps({"text": words, "label": labels}) + "\n" for words, labels in rows))
    draw = np.random.default_rng(0)
    for number in range(24):
        file = folder / "images" / ("dark", "light")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((draw.integers(0, 100, (20, 20, 3)) + 150 * (number % 2)).astype(np.uint8)).save(file)
    return {
        "seq2seq_lm": {"source": "jsonl", "path": str(pairs), "max_length": 24},
        "token_classification": {"source": "jsonl", "path": str(tags), "max_length": 24},
        "masked_lm": {"source": "text", "path": str(texts), "sequence": 16},
        "image_classification": {"source": "images", "path": str(folder / "images")},
    }
