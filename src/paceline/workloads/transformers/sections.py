"""What the run file says of a model of the library transformers, and of its texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from paceline.config.sections import ModelSection, Section, conflict_error, field

LENGTH_STEP = 32  # tokens, to a multiple of which texts are padded where steps are recorded
TABLES = ("csv", "jsonl", "parquet")


@dataclass(frozen=True)
class Task:
    auto: str  # the library's class
    sources: tuple[str, ...]  # of data
    peft: str | None  # what PEFT calls it
    length: str = "max_length"  # the key of `data` that bounds a sample
    classes: bool = False  # whether it is scored by classes, else by the loss


TASKS = {
    "causal_lm": Task("AutoModelForCausalLM", ("docstrings", "text", *TABLES), "CAUSAL_LM", "sequence"),
    "masked_lm": Task("AutoModelForMaskedLM", ("docstrings", "text"), None, "sequence"),
    "seq2seq_lm": Task("AutoModelForSeq2SeqLM", TABLES, "SEQ_2_SEQ_LM"),
    "sequence_classification": Task(
        "AutoModelForSequenceClassification", ("docstrings", "ag_news", *TABLES), "SEQ_CLS", classes=True
    ),
    "token_classification": Task("AutoModelForTokenClassification", TABLES, "TOKEN_CLS", classes=True),
    "image_classification": Task("AutoModelForImageClassification", ("images",), None, classes=True),
}
NAMES: Any = tuple(TASKS)
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


class ModelFolder(ModelSection):
    """Architecture from `config`, else from the folder `start`, which has the weights; without it they are drawn."""

    config: Path | None = field(None, "path", "config.json or its folder, for random weights; else that of init_from")
    task: Literal[NAMES] = field("causal_lm", "", "what is predicted, from what: see transformers.md")  # type: ignore[valid-type]
    dropout: bool = field(True, "", "keep the dropout of the config, drawn by sample; false switches it off")
    lora_rank: int = field(0, "features", "rank of low-rank adapters; 0 trains all weights", ge=0)
    lora_alpha: float | None = field(None, "", "scales adapters by alpha / rank; none is twice the rank", gt=0)
    quantize: Literal["none", "nf4"] = field("none", "", "nf4: weights beside the adapters in 4 bits (QLoRA)")
    lora_targets: tuple[str, ...] = field((), "names", "linear layers with adapters, as [q_proj, v_proj]; empty: all")

    @model_validator(mode="after")
    def _adapters_have_a_rank(self) -> ModelFolder:
        if not self.lora_rank and (self.lora_alpha is not None or self.lora_targets):
            name = "lora_targets" if self.lora_targets else "lora_alpha"
            raise conflict_error(f"model.{name} is given, but model.lora_rank=0 trains all weights; try  lora_rank: 8")
        if self.quantize != "none" and not self.lora_rank:
            raise conflict_error(f"model.quantize={self.quantize} needs adapters to train; add  lora_rank: 8")
        return self

    def determining_files(self) -> list[Path]:
        given = self.config or self.init_from
        if given is None or given.is_file():
            return [given, given.with_name(PREPROCESSOR)] if given else []
        return [given / part / name for part in ("", "kept") for name in (CONFIG, PREPROCESSOR)]

    @property
    def lora_scale(self) -> float:
        return (self.lora_alpha or 2.0 * self.lora_rank) / self.lora_rank


class Texts(Section):
    """Texts end to end, conversations, texts with labels, tags or targets, or images: what the task takes."""

    source: Literal["docstrings", "text", "ag_news", "csv", "jsonl", "parquet", "images"] = field(
        "docstrings", "", "of the samples; which of them depends on model.task"
    )
    path: Path | None = field(None, "path", "a file; ag_news, images: a folder; text: a file, a folder or a pattern")
    test_path: Path | None = field(None, "path", "held-out file or folder; without one, test_fraction")
    test_fraction: float = field(0.1, "fraction", "documents or rows held out", gt=0, lt=1)
    text: str = field("text", "column", "column or key of the text, or of the words")
    label: str = field("label", "column", "column or key of the class, of the target text, or of the tags")
    messages: str = field("messages", "column", "causal_lm: conversations, lists of messages with role and content")
    prompt: str = field("prompt", "column", "causal_lm: what is asked, in a table without messages")
    response: str = field("response", "column", "causal_lm: the answer to each prompt")
    template: Path | None = field(None, "path", "chat template (Jinja); else that of the tokeniser, if it has one")
    too_long: Literal["reject", "cut", "skip"] = field("reject", "", "conversations of more than `sequence` tokens")
    pack: bool = field(True, "", "several conversations in one sequence, none of which sees another")
    documents: Literal["files", "lines"] = field("files", "", "text: what is one document")
    sequence: int = field(256, "tokens", "causal_lm, masked_lm: length of a sample", gt=0)
    max_length: int = field(256, "tokens", "of the other tasks: longer texts are cut", gt=0)
    masked: float = field(0.15, "fraction", "masked_lm: of the tokens, drawn by sample", gt=0, lt=1)
    tokenizer: Path | None = field(None, "path", "tokenizer.json; else that of the model's folder, or learned")
    vocab: int = field(4096, "tokens", "size of the vocabulary, where it is learned", ge=257, le=1 << 20)
    limit: int = field(0, "documents", "read at most this many; 0 reads all", ge=0)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of tokenised corpora, named by content")

    @property
    def lowercase(self) -> bool:
        """A tokeniser of others knows itself whether to fold case."""
        return False
