"""Use a tokeniser or a chat template from elsewhere in a process with limits: a few bytes can ask for terabytes.

This file also runs as that process: its top-level imports are the standard library alone.
"""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

MAX_BYTES = 4 << 30
PATIENCE_S, CHARACTERS_S = 60.0, 10_000  # so long, and a second more for so many characters
HARMLESS = {
    *("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents", "BertNormalizer", "ByteLevel", "Metaspace"),
    *("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation", "CharDelimiterSplit"),
    *("WordPiece", "ByteFallback", "Fuse", "BertProcessing", "RobertaProcessing"),
}
"""Parts that make, once each, at most a few characters of one, in linear time, without a pattern of the file."""
MAX_AFFIX, MAX_WORD = 16, 1000  # characters that a model adds to a part of a word, and of a word that it searches
SAFE_CALLS = {"get_vocab", "get_vocab_size", "id_to_token", "token_to_id", "to_str", "truncation"}


@dataclass(frozen=True)
class EncodedText:
    """What is used of a `tokenizers.Encoding`."""

    ids: list[int]
    overflowing: bool

    def __len__(self) -> int:
        return len(self.ids)


def limit_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer, without padding; one with parts that could grow a text is called in its own process."""
    tokenizer.no_padding()
    if cut := tokenizer.truncation:
        tokenizer.enable_truncation(cut["max_length"], direction=cut["direction"])  # without a stride
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder)
    found = [re.findall(rb'"type":"(\w+)"', part.__getstate__()) for part in parts if part is not None]
    kinds = [[kind.decode() for kind in each if kind != b"Sequence"] for each in found]
    harmless = all(HARMLESS.issuperset(each) and len(each) == len(set(each)) for each in kinds)
    names = ("continuing_subword_prefix", "end_of_word_suffix")
    long = any(len(getattr(tokenizer.model, name, None) or "") > MAX_AFFIX for name in names)
    long = long or getattr(tokenizer.model, "max_input_chars_per_word", 0) > MAX_WORD
    return LimitedTokenizer(tokenizer) if long or not harmless else tokenizer


def encode_spelt(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Encode texts that spell special tokens, as a chat template does; return the ids, and where each token begins."""
    if isinstance(tokenizer, LimitedTokenizer):
        return list(tokenizer.ask(sum(map(len, texts)), list(texts), None))
    tokenizer.encode_special_tokens = False
    try:
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = True
    return [(text.ids, [start for start, _ in text.offsets]) for text in found]


class LimitedProcess:
    """A process that handles texts, with a limit of memory and of time; `what` is a key of `HANDLERS`."""

    def __init__(self, what: str, content: str, key: str, blamed: str) -> None:
        self._begin, self._key, self._blamed, self._started_by = [what, content], key, blamed, 0
        self._process: Any = None

    def ask(self, characters: int, *request: Any) -> Any:
        """Return the answer; raise UserError if it takes too much."""
        if self._started_by != os.getpid():  # a fork has its own
            self._pipe, self._process = _start_process(self._begin)
            self._started_by = os.getpid()
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            if self._pipe.poll(PATIENCE_S + characters / CHARACTERS_S):
                return json.loads(self._pipe.recv_bytes())
            reason = "takes too long"
        except (EOFError, OSError):
            reason = f"takes more than {MAX_BYTES >> 30} GB of memory, or fails"
        from paceline.errors import UserError

        self._process.kill()
        self._process.wait()
        self._started_by = 0
        message = f"{self._key}: {self._blamed} make too much of a text: that {reason}"
        raise UserError(f"{message}; use another", code="invalid-data", key=self._key)


class LimitedTokenizer:
    """A tokenizer whose texts are encoded and decoded in another process; one that takes too much is a UserError."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        blamed = "the normaliser or the patterns of the tokenizer.json"
        self.ask = LimitedProcess("tokenizer", tokenizer.to_str(), "data.tokenizer", blamed).ask

    def __getattr__(self, name: str) -> Any:
        if name not in SAFE_CALLS:
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[EncodedText]:
        rows = self.ask(sum(map(len, texts)), list(texts), add_special_tokens)
        return [EncodedText(ids, overflowing) for ids, overflowing in rows]

    def encode(self, text: str, add_special_tokens: bool = True) -> EncodedText:
        return self.encode_batch_fast([text], add_special_tokens)[0]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.ask(len(ids), list(ids)))


def _start_process(begin: Sequence[str]) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    command = [sys.executable, "-I", __file__, str(theirs.fileno())]
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RUST_BACKTRACE": "0"}
    null = subprocess.DEVNULL
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdin=null, stderr=null)
    ours.send_bytes(json.dumps(begin).encode())
    return ours, process


def serve(pipe: Connection) -> None:
    """Answer requests until the other end is closed."""
    for kind, limit in ((resource.RLIMIT_DATA, MAX_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError):  # a lower one is set already
            resource.setrlimit(kind, (limit, limit))
    what, content = json.loads(pipe.recv_bytes())
    handle = HANDLERS[what](content)
    while True:
        pipe.send_bytes(json.dumps(handle(*json.loads(pipe.recv_bytes()))).encode())


def build_tokenizer_handler(serialised: str) -> Callable[..., Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(serialised)
    tokenizer.encode_special_tokens = True

    def handle(content: Any, *framed: Any) -> Any:
        if framed == (None,):
            return encode_spelt(tokenizer, content)
        if not framed:
            return tokenizer.decode(content)
        encodings = tokenizer.encode_batch_fast(content, add_special_tokens=framed[0])
        return [(encoding.ids, bool(encoding.overflowing)) for encoding in encodings]

    return handle


def build_template_handler(text: str) -> Callable[..., Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def handle(messages: Any, options: Any) -> Any:
        """Return (the rendered text, the token mask of its answers, an error or "")."""
        try:
            texts, marks = render_jinja_template(conversations=[messages], chat_template=text, **options)
        except MemoryError:
            raise
        except Exception as error:  # whatever a template does, or raises itself
            return "", [], f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return texts[0], marks[0] if marks else [], ""

    return handle


HANDLERS = {"tokenizer": build_tokenizer_handler, "template": build_template_handler}


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    except EOFError:
        sys.exit(0)
