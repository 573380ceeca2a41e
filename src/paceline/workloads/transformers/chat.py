"""Instruction data: conversations as a chat template spells them, with the loss on the answers."""

import json
import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.corpora.documents import DocumentPart, TokenStreams
from paceline.data.corpora.limited_process import LimitedProcess, encode_spelt
from paceline.data.corpora.tokenised import SPLITS, BuiltCorpus, TokenisedCorpus
from paceline.data.corpora.tokenizer import END, ChosenTokenizer, load_tokenizer
from paceline.data.files import check_file, invalid_data, invalid_format
from paceline.data.tables import iter_rows
from paceline.errors import UserError, join_names
from paceline.io.files import hash_value, read_text
from paceline.workload import LogFn
from paceline.workloads.transformers.pairs import (
    NO_TAG,
    PairCorpus,
    PairTable,
    count_rows,
    encode_pieces,
    find_frame,
    write_split,
)

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 22
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that marks the answers itself
ANSWERING = "assistant"
EXAMPLE = '[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
PACKABLE = (
    *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "llama"),
    *("ministral", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""Architectures that keep what is packed apart by its positions. Others (opt, gpt_oss, …) silently do not."""


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    where: str

    def __str__(self) -> str:
        """What comes before the first answer: equal questions are held out together."""
        first = next((n for n, message in enumerate(self.messages) if message["role"] == ANSWERING), None)
        return str(self.messages[:first])


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, rendered in a sandbox with limits, and the special tokens it may name."""

    text: str
    file: Path
    tokens: Mapping[str, str]

    @classmethod
    def find(cls, data: Any) -> "ChatTemplate | None":
        """Return the template that the run file names, else that beside the tokeniser; None without one."""
        folder = data.tokenizer.parent if data.tokenizer is not None else None
        file = check_file(data.template, "data.template") if data.template is not None else None
        values: dict[str, Any] = {}
        try:
            if folder is not None and (folder / TOKENIZER_CONFIG).is_file():
                values = dict(json.loads(read_text(folder / TOKENIZER_CONFIG, MAX_TEMPLATE_BYTES)))
            if file is None and folder is not None and (folder / TEMPLATE).is_file():
                file = folder / TEMPLATE
            text = read_text(file, MAX_TEMPLATE_BYTES) if file is not None else values.get("chat_template")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason = f"{file or folder}: cannot be read as a chat template ({error})"
            raise invalid_format(reason, "data.template") from None
        if isinstance(text, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
            text = named.get("default") or next(iter(named.values()), None)
        given = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
        tokens = {name: value for name, value in given.items() if name.endswith("_token") and isinstance(value, str)}
        where = file or (folder / TOKENIZER_CONFIG if folder is not None else Path(TOKENIZER_CONFIG))
        return cls(text, where, tokens) if isinstance(text, str) else None

    def render(self, messages: Sequence[Any], where: str, **how: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and with `return_assistant_tokens_mask` where its answers are."""
        characters = sum(len(message["content"]) for message in messages)
        text, marks, error = self._process.ask(characters, list(messages), {**how, **self.tokens})
        if error:
            reason = f"{where}: the chat template {self.file} raises: {error}"
            raise invalid_data(f"{reason}; give another as  data.template=FILE.jinja", "data.template")
        return text, [(start, end) for start, end in marks]

    @cached_property
    def _process(self) -> LimitedProcess:
        return LimitedProcess("template", self.text, "data.template", f"loops or texts of {self.file}")

    def find_answers(self, messages: Sequence[Any], where: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the spans (begin, end) of its answers, each with what ends it.

        An answer is what follows after the prompt to answer, up to the beginning of the next message.
        """
        if MARKED.search(self.text):
            return self.render(messages, where, return_assistant_tokens_mask=True)
        whole = self.render(messages, where)[0]
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != ANSWERING:
                continue
            prompt = self.render(messages[:number], where, add_generation_prompt=True)[0]
            start = count_shared(prompt, whole)
            end = count_shared(self.render(messages[: number + 1], where)[0], whole)
            if end <= start:
                reason = f"{where}: the chat template {self.file} leaves answer {1 + len(spans)} out"
                raise invalid_data(f"{reason}; mark answers in it by  {{% generation %}}", "data.template")
            spans.append((start, end))
        return whole, spans


def count_shared(left: str, right: str) -> int:
    """Return the length of the text that both begin with."""
    differ = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differ, min(len(left), len(right)))


class ChatTable(PairTable):
    """Conversations: a column of messages, or a column of prompts and one of responses."""

    def __init__(self, data: Any, looking: bool = False) -> None:
        super().__init__(data, looking)
        self.template = ChatTemplate.find(data)

    def fingerprint(self) -> str:
        return hash_value([super().fingerprint(), self.template and [self.template.text, dict(self.template.tokens)]])

    @property
    def wanted(self) -> dict[str, str]:
        return find_columns(self.data)

    def read_row(self, row: Sequence[Any], where: str) -> tuple[Any, Any]:
        if len(row) == 2:
            prompt, response = super().read_row(row, where)
            return Conversation(pair_messages(prompt, response), where), None
        messages = row[0] if isinstance(row[0], list) else []
        texts = [m.get(key) if isinstance(m, dict) else None for m in messages for key in ("role", "content")]
        if not all(isinstance(text, str) for text in texts) or ANSWERING not in texts[::2]:
            raise invalid_data(f"{where}: expected messages with an answer in {self.data.messages!r}, as {EXAMPLE}")
        if self.template is None:
            hint = "give one as  data.template=FILE.jinja, or the tokenizer.json of a chat model"
            raise invalid_data(f"{where}: the tokenizer has no chat template; {hint}", "data.template")
        return Conversation(messages, where), None


def pair_messages(prompt: str, response: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": ANSWERING, "content": response}]


def find_columns(data: Any) -> dict[str, str]:
    """Return the columns of conversations that a table has; else that of its texts."""
    if data.path is None:
        return {}
    file = check_file(data.path, "data.path")
    names = next(iter_rows(file, data.source), {})
    wanted = [{"data.messages": data.messages}, {"data.prompt": data.prompt, "data.response": data.response}]
    found = next((columns for columns in wanted if all(name in names for name in columns.values())), None)
    if found is None and data.text not in names:
        options = f"{data.messages!r}, {data.prompt!r} and {data.response!r}, or {data.text!r}"
        hint = "name yours by  data.messages=, data.prompt= and data.response=, or data.text="
        has = f"its columns are {join_names(list(map(str, names)), 12) or 'none'}"
        raise UserError(f"{file}: no column {options}; {has}; {hint}", code="unknown-name", key="data.text")
    return found or {"data.text": data.text}


@dataclass
class ChatEncoder:
    """Conversations as tokens, with a label for each token of an answer."""

    chosen: ChosenTokenizer
    template: ChatTemplate | None
    most: int = 0  # tokens of a conversation; 0 is any number
    too_long: str = "reject"
    long: list[tuple[int, str]] = field(default_factory=list)  # those with more, and where they are

    def encode_group(self, chosen: ChosenTokenizer, group: Sequence[tuple[Conversation, Any]]) -> Iterator[list[Any]]:
        """Yield the tokens of conversations, and their labels."""
        kept = []
        for (ids, labels), (conversation, _) in zip(self.encode([row for row, _ in group]), group, strict=True):
            if self.most and len(ids) > self.most:
                self.long.append((len(ids), conversation.where))
                ids, labels = (ids[: self.most], labels[: self.most]) if self.too_long == "cut" else ([], [])
            if any(label != NO_TAG for label in labels[1:]):
                kept.append((ids, labels))
        yield [ids for ids, _ in kept]
        yield [labels for _, labels in kept]

    def encode(self, conversations: Sequence[Conversation]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the tokens of each, and a label for each token."""
        if self.template is None:
            opening = find_frame(self.chosen)[0]
            texts = [[message["content"] for message in conversation.messages] for conversation in conversations]
            for prompt, answer in encode_pieces(self.chosen, texts):
                answer = [*answer, self.chosen.special]
                yield [*opening, *prompt, *answer], [NO_TAG] * len([*opening, *prompt]) + answer
            return
        found = [self.template.find_answers(*conversation) for conversation in conversations]
        encoded = encode_spelt(self.chosen.tokenizer, [text for text, _ in found])
        for (ids, places), (_, spans) in zip(encoded, found, strict=True):
            inside = [any(start <= at < end for start, end in spans) for at in places]
            yield ids, [token if own else NO_TAG for token, own in zip(ids, inside, strict=True)]

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens after which the model is to answer."""
        if self.template is None:
            return [*find_frame(self.chosen)[0], *self.chosen.tokenizer.encode(prompt, add_special_tokens=False).ids]
        text = self.template.render(pair_messages(prompt, "")[:1], "prompt", add_generation_prompt=True)[0]
        return list(encode_spelt(self.chosen.tokenizer, [text])[0][0])

    def find_ends(self) -> set[int]:
        """Return the tokens that end an answer: the usual one, and that which follows an answer in the template."""
        if self.template is None:
            return {self.chosen.special}
        [(_, labels)] = self.encode([Conversation(pair_messages("a", "a"), "an answer")])
        special = {token["id"] for token in json.loads(self.chosen.tokenizer.to_str())["added_tokens"]}
        return {self.chosen.special, *[token for token in labels if token in special][:1]}


class ChatCorpus(PairCorpus):
    """Conversations, of which the answers have labels."""

    open_source = ChatTable
    prefix = "chat-"
    settings = ("vocab", "sequence", "too_long")

    @classmethod
    def build(cls, data: Any, source: Any, folder: Path, log: LogFn) -> BuiltCorpus:
        texts = (message["content"] for row, _ in source.iter_pairs("train") for message in row.messages)
        chosen = load_tokenizer(data, texts, END, None, False, log)
        encoder = ChatEncoder(chosen, source.template, data.sequence, data.too_long)
        form = f"formatted by {source.template.file}" if source.template else "each followed by its response"
        log(f"corpus: {' and '.join(map(repr, source.wanted.values()))} {form}, with the loss on the answers alone")
        arrays = [w for s in SPLITS for w in write_split(folder, s, source, chosen, encoder.encode_group)]
        if encoder.long and data.too_long == "reject":
            longest, (tokens, where) = max(encoder.long)[0], encoder.long[0]
            given = f"{where}: {tokens:,} tokens, more than data.sequence={data.sequence}"
            others = f"{len(encoder.long):,} such rows, the longest has {longest:,}"
            raise invalid_data(f"{given} ({others}); raise it, or type  data.too_long=cut  or  skip", "data.sequence")
        train, test = count_rows(arrays)
        summary = f"{train:,} training and {test:,} test conversations"
        warnings = [f"{len(encoder.long):,} conversations were longer than data.sequence ({data.too_long})"]
        counts = {"train": {"samples": train}, "test": {"samples": test}}
        return BuiltCorpus(chosen, counts, arrays, summary, warnings if encoder.long else (), {"classes": ()})

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test conversations"


def pack_lengths(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pack numbers into rows whose lengths add up to at most `room`: longest first, each where it fits best.

    Without room, each has a row.
    """
    if not room:
        return [[number] for number in range(len(lengths))]
    rows: list[list[int]] = []
    free: list[int] = []  # rooms that some row has left, sorted
    having = defaultdict[int, list[int]](list)  # numbers of rows by the room that they have left
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        at = bisect_left(free, length)
        if at == len(free):
            rows.append([])
            place, left = len(rows) - 1, room
        else:
            left = free[at]
            place = having[left].pop()
            if not having[left]:
                del free[at]
        rows[place].append(number)
        left -= length
        if not having[left]:
            insort(free, left)
        having[left].append(place)
    return rows


class TextColumn(PairTable):
    """A column of texts, each of them a document."""

    @property
    def wanted(self) -> dict[str, str]:
        return {"data.text": self.data.text}

    def read_row(self, row: Sequence[Any], where: str) -> tuple[Any, Any]:
        if not isinstance(row[0], str):
            raise invalid_data(f"{where}: expected a text in {self.data.text!r}")
        return row[0], None

    def parts(self) -> Iterator[DocumentPart]:
        for split in SPLITS:
            yield from (DocumentPart(text, split == "test", True) for text, _ in self.iter_pairs(split) if text.strip())


class ColumnStreams(TokenStreams):
    """The texts of a column, end to end."""

    open_source = TextColumn
    prefix = "column-"


def find_corpus(data: Any) -> type[TokenisedCorpus]:
    """Return the corpus of a table: of conversations if it has such columns, else of texts."""
    return ColumnStreams if "data.text" in find_columns(data) else ChatCorpus
