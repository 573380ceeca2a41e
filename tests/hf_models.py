"""Tiny models of the library transformers, drawn and saved on the spot with a tokeniser of their own."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

SIDES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 3}
LLAMA = {**SIDES, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {**SPECIAL, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {**SIDES, "pad_token_id": 0, "max_position_embeddings": 64}
KINDS = {"llama": LLAMA, "gpt2": GPT2, "bert": BERT}
TEXTS = [
    f"{word} number {i} of the list is {colour}"
    for i in range(40)
    for word, colour in (("good", "red"), ("bad", "blue"))
]


def save(kind: str, folder: Path, auto: str = "AutoModelForCausalLM", dtype: str = "float32") -> Path:
    import torch
    import transformers

    tokenizer = save_tokenizer(folder)
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[kind](vocab_size=tokenizer.get_vocab_size(), **KINDS[kind])
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


def labelled(file: Path) -> Path:
    file.write_text("text,label\n" + "".join(f"{text},{text.split()[0]}\n" for text in TEXTS))
    return file
