"""The tasks that models of the library are trained for, without torch: a plan looks at them too."""

from __future__ import annotations

from dataclasses import dataclass

TABLES = ("csv", "jsonl", "parquet")


@dataclass(frozen=True)
class Task:
    auto: str  # the library's class
    sources: tuple[str, ...]  # of data
    peft: str | None  # what PEFT calls it
    length: str = "max_length"  # the key of `data` that bounds a sample
    classes: bool = False  # whether it is scored by classes, else by the loss


TASKS = {
    "causal_lm": Task("AutoModelForCausalLM", ("docstrings", "text"), "CAUSAL_LM", "sequence"),
    "masked_lm": Task("AutoModelForMaskedLM", ("docstrings", "text"), None, "sequence"),
    "seq2seq_lm": Task("AutoModelForSeq2SeqLM", TABLES, "SEQ_2_SEQ_LM"),
    "sequence_classification": Task(
        "AutoModelForSequenceClassification", ("docstrings", "ag_news", *TABLES), "SEQ_CLS", classes=True
    ),
    "token_classification": Task("AutoModelForTokenClassification", TABLES, "TOKEN_CLS", classes=True),
    "image_classification": Task("AutoModelForImageClassification", ("images",), None, classes=True),
}
