"""The result of a fit: topics of documents, terms of topics, how they are ordered, and the model file."""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.data.files import invalid_format, unreadable_error
from paceline.errors import InvalidValue, UserError, get_first_line
from paceline.io.escape import escape_hidden, to_one_line
from paceline.io.files import replace_nonfinite, to_json_value, write_atomic
from paceline.io.format import duration, number
from paceline.workloads.topics.counts.matrices import Counts

if TYPE_CHECKING:
    from paceline.workloads.topics.fitting.engine import AcceleratedEM


BY_LIFT = 0.05  # the weight of log p: of the many terms that one topic alone uses, the more probable come first
WAYS = {"probability": 1.0, "lift": BY_LIFT}
NAMING, NAMING_TERMS = 0.3, 5  # the weight of log p for the terms that name a topic, and how many
SMALLEST = 1e-30


class Alignment(NamedTuple):
    order: np.ndarray  # F[order] is ordered as the reference; topics without a counterpart come last
    similarities: np.ndarray  # cosine of each with its counterpart; NaN for those without one


def align_topics(F: Any, reference: Any) -> Alignment:
    """Match topics one to one so that the sum of their cosines is largest. Takes fits or arrays (k, terms)."""
    from scipy.optimize import linear_sum_assignment

    ours, theirs = as_matrix(F, "F"), as_matrix(reference, "F")
    if ours.shape[1] != theirs.shape[1]:
        raise InvalidValue(f"topics over {ours.shape[1]:,} and over {theirs.shape[1]:,} terms", key="terms")
    if len(ours) < len(theirs):
        message = f"{len(ours)} topics cannot be matched one to one with {len(theirs)}: swap the two"
        raise InvalidValue(message, key="reference")
    cosines = _normalise_rows(theirs) @ _normalise_rows(ours).T
    _, matched = linear_sum_assignment(cosines, maximize=True)
    rest = np.setdiff1d(np.arange(len(ours)), matched)
    similar = cosines[np.arange(len(theirs)), matched]
    return Alignment(np.concatenate([matched, rest]), np.concatenate([similar, np.full(len(rest), np.nan)]))


def sort_documents(L: Any) -> np.ndarray:
    """Sort documents by their leading topic, then by their second, then by purity."""
    shares = as_matrix(L, "L")
    documents = np.arange(len(shares))
    first = shares.argmax(axis=1)
    lead = shares[documents, first]
    others = shares.copy()
    others[documents, first] = -1
    return np.lexsort((-lead, others.argmax(axis=1), first))


def average_neighbours(shares: np.ndarray, order: np.ndarray, most: int) -> np.ndarray:
    """Return the mixtures of documents in this order; of more than `most`, the means of neighbours."""
    edges = np.linspace(0, len(order), min(most, len(order)) + 1).round().astype(np.int64)
    return np.add.reduceat(shares[order], edges[:-1], axis=0) / np.diff(edges)[:, None]


def as_matrix(given: Any, which: str) -> np.ndarray:
    if not isinstance(given, TopicFit) and hasattr(given, "fit_"):
        given = given.fit_
    if isinstance(given, TopicFit):
        return getattr(given, which)
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    array = np.asarray(given)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or 0 in array.shape:
        shape = "(documents, k)" if which == "L" else "(k, terms)"
        message = f"a fit or an array {shape} is needed; this is {type(given).__name__} of shape {array.shape}"
        raise InvalidValue(message, key=which)
    return array


def _normalise_rows(F: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(F.astype(np.float32, copy=False), axis=1, keepdims=True)
    return F / np.maximum(lengths, 1e-30)


def find_top_terms(F: np.ndarray, shares: np.ndarray, n: int, by: str = "probability") -> list[np.ndarray]:
    if by not in WAYS:
        raise InvalidValue(f"by={by!r}: give {' or '.join(WAYS)}", key="by")
    return rank_terms(F, np.asarray(shares, np.float64) @ F, n, [WAYS[by]])[0]


def rank_terms(F: np.ndarray, everywhere: np.ndarray, n: int, weights: Sequence[float]) -> list[list[np.ndarray]]:
    """Return for each weight w and each topic the n top terms by  w log p + (1 - w) log lift.

    Lift, p(term in topic) / p(term everywhere), favours rare terms: those below 1 / number of terms come last.
    """
    n = min(n, F.shape[1])
    log_everywhere = np.log(np.maximum(everywhere, SMALLEST)).astype(np.float32)
    found: list[list[np.ndarray]] = [[] for _ in weights]
    for p in F:
        log_p = np.log(np.maximum(p, SMALLEST))
        rare = p * np.float32(F.shape[1]) < 1
        for place, weight in enumerate(weights):
            score = log_p - np.float32(1 - weight) * log_everywhere
            if weight < 1:
                score[rare] = log_p[rare] - np.float32(1e3)
            found[place].append(find_largest(score, n))
    return found


def find_largest(values: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n largest values, largest first; of equals, the first."""
    if 4 * n < len(values):
        least = np.partition(values, len(values) - n)[len(values) - n]
        near = np.flatnonzero(values >= least)
        return near[np.argsort(-values[near], kind="stable")[:n]]
    return np.argsort(-values, kind="stable")[:n]


SHOWN_TOPICS = 20
MODEL_FILE = "model.safetensors"  # in the folder of a run
FORMAT = "paceline topics 1"
ARRAYS = ("L", "F", "losses")
WORDS = ("terms", "names", "about")
ABOUT = ("loss", "passes", "converged", "stopped_because", "seconds", "settings")
HEADER_BYTES = 8 << 20  # longer lists are stored as arrays: readers reject a header of 100 MB
AGAIN = "save it again or copy it again"


@dataclass(eq=False, repr=False)
class TopicFit:
    """Counts ~ L F. Topics are numbered from 0, as in the arrays."""

    L: np.ndarray  # (documents, k) float32; a row is the mixture of a document and sums to one
    F: np.ndarray  # (k, terms) float32; a row is a topic and sums to one
    losses: list[float] = field(default_factory=list)  # after every pass
    loss: float = math.nan
    terms: list[str] | None = None
    names: list[str] | None = None
    passes: int = 0
    converged: bool = False
    stopped_because: str = ""
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.L.ndim != 2 or self.F.ndim != 2 or self.L.shape[1] != self.F.shape[0]:
            message = f"L has the shape {self.L.shape} and F {self.F.shape}: give (documents, k) and (k, terms)"
            raise InvalidValue(message, key="F")
        for what, names, expected in (("terms", self.terms, self.F.shape[1]), ("names", self.names, self.L.shape[0])):
            if names is not None and len(names) != expected:
                message = f"{len(names):,} {what} for {expected:,} {'columns' if what == 'terms' else 'rows'}"
                raise InvalidValue(message, key=what)
        if math.isnan(self.loss) and self.losses:
            self.loss = float(self.losses[-1])

    @classmethod
    def of(
        cls, fit: "AcceleratedEM", counts: Counts, LF: Sequence[np.ndarray], loss: float, seconds: float, settings: Any
    ) -> "TopicFit":
        """Build the result of a fit that has ended; L and F are those of all ranks."""
        terms, names = (None if given is None else list(given) for given in (counts.vocabulary, counts.names))
        L, F = LF
        ended = (fit.passes, fit.converged, fit.end_words(), seconds)
        return cls(L, F, list(fit.losses), loss, terms, names, *ended, settings)

    @property
    def k(self) -> int:
        return int(self.F.shape[0])

    def save(self, path: str | Path) -> Path:
        """Write one .safetensors file, atomically: arrays, and the rest as JSON in its header."""
        from safetensors.numpy import save

        path = Path(path).expanduser()
        if path.suffix != ".safetensors":
            instead = path.with_suffix(".safetensors")
            raise InvalidValue(f"{str(path)!r} does not end in .safetensors; write it as  {instead}", key="path")
        arrays: dict[str, np.ndarray] = {name: np.ascontiguousarray(getattr(self, name), np.float32) for name in "LF"}
        arrays["losses"] = np.asarray(self.losses, np.float64)
        about = replace_nonfinite({name: getattr(self, name) for name in ABOUT})
        header = {"format": FORMAT}
        for name, value in zip(WORDS, (self.terms, self.names, about), strict=True):
            text = json.dumps(value, ensure_ascii=True, default=to_json_value)
            if len(text) <= HEADER_BYTES:
                header[name] = text
            else:
                arrays[name] = np.frombuffer(text.encode(), np.uint8)
        header["sum"] = _compute_checksum(arrays, header)
        write_atomic(path, save(arrays, metadata=header))
        return path

    @classmethod
    def load(cls, path: str | Path) -> "TopicFit":
        """Read what `save` wrote, without executing anything in the file."""
        from safetensors import SafetensorError, safe_open

        path = Path(path).expanduser()
        if not path.is_file():
            raise UserError(f"{path}: no such file", code="not-found")
        try:
            with safe_open(path, framework="numpy") as file:
                header, stored = file.metadata() or {}, list(file.keys())
                if header.get("format") != FORMAT or not set(ARRAYS) <= set(stored):
                    found = ", ".join(stored)[:80] or "nothing"
                    raise invalid_format(f"{path}: not a topic model (found: {found})")
                arrays = {name: file.get_tensor(name) for name in stored}
            if header.get("sum") != _compute_checksum(arrays, header):
                raise ValueError("its checksum differs")
            terms, names, about = (json.loads(header.get(name) or bytes(arrays[name]).decode()) for name in WORDS)
            if about["loss"] is None:
                about["loss"] = np.nan
            if any(arrays[name].dtype.kind != "f" for name in ARRAYS) or arrays["losses"].ndim != 1:
                raise ValueError("its arrays are of other types")
            return cls(arrays["L"], arrays["F"], arrays["losses"].tolist(), terms=terms, names=names, **about)
        except UserError:
            raise
        except OSError as error:
            raise unreadable_error(path, error) from None
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path}: is damaged ({get_first_line(error)}); {AGAIN}", code="damaged") from None

    def transform(
        self, new_docs: Any, *, passes: int = 100, tolerance: float = 1e-9, fractional: bool = False
    ) -> np.ndarray:
        """Return the mixtures (documents, k) of what `fit` takes, with the same columns.

        A model with terms also takes a text, a list of texts or a file of texts; unknown words are left out.
        """
        from paceline.workloads.topics.result.new_documents import infer_mixtures

        return infer_mixtures(self._read_counts(new_docs, fractional), self.F, passes, tolerance)[0]

    def top_terms(self, n: int = 10, by: str = "probability") -> list[list[str]]:
        """Return the n top terms of each topic, by probability or by lift (probability in the topic / overall)."""
        return [[self.term(at) for at in row] for row in self.top_term_numbers(n, by)]

    def top_term_numbers(self, n: int = 10, by: str = "probability") -> list[np.ndarray]:
        return find_top_terms(self.F, self.topic_shares(), n, by)

    def topic_names(self, lengths: np.ndarray | None = None, n: int = NAMING_TERMS) -> list[str]:
        """Name each topic by n terms, neither the commonest nor the rarest; `lengths` as in `topic_shares`."""
        (rows,) = rank_terms(self.F, self.topic_shares(lengths) @ self.F, n, [NAMING])
        return [", ".join(to_one_line(self.term(at)) or "(blank)" for at in row) for row in rows]

    def term(self, at: int) -> str:
        return f"term {at}" if self.terms is None else self.terms[at]

    def document(self, at: int) -> str:
        return f"document {at}" if self.names is None else self.names[at]

    def topic_shares(self, lengths: np.ndarray | None = None) -> np.ndarray:
        """Return each topic's share of the documents or, with the lengths of the documents, of the words."""
        if lengths is None:
            return self.L.mean(axis=0, dtype=np.float64)
        weights = np.asarray(lengths, np.float64)
        if weights.shape != (len(self.L),):
            raise InvalidValue(f"{weights.size:,} lengths for {len(self.L):,} documents", key="lengths")
        return weights @ self.L / max(weights.sum(), SMALLEST)

    def sort_topics(self, order: Sequence[int] | np.ndarray | None = None) -> "TopicFit":
        """Return the fit with its topics in the given order, or the largest share first."""
        new = np.argsort(-self.topic_shares(), kind="stable") if order is None else np.asarray(order)
        if not np.array_equal(np.sort(new), np.arange(self.k)):
            raise InvalidValue(f"order={new.tolist()}: name each of the topics 0 to {self.k - 1} once", key="order")
        return replace(self, L=np.ascontiguousarray(self.L[:, new]), F=np.ascontiguousarray(self.F[new]))

    def perplexity(self, X: Any, *, smoothing: float = 0.01, seed: int = 0, fractional: bool = False) -> float:
        """Return the perplexity of unseen words of these documents; lower is better.

        Document completion: each word is known or unseen, by a coin. The known words give the mixture, the unseen ones
        are scored:  exp(- sum x log p / sum x)  with  p = (1 - smoothing) LF + smoothing / m.
        """
        from paceline.workloads.topics.result.new_documents import compute_perplexity

        return compute_perplexity(self, self._read_counts(X, fractional), smoothing, seed)

    def coherence(self, X: Any, n: int = 10, *, by: str = "probability", fractional: bool = False) -> np.ndarray:
        """Return the coherence of each topic's n top terms in the documents of X, from -1 to 1.

        It is the mean over pairs of terms of NPMI = log(p_ij / (p_i p_j)) / -log p_ij, p the share of documents with
        them; -1 for two that never occur together.
        """
        from paceline.workloads.topics.result.new_documents import compute_coherence

        return compute_coherence(self._read_counts(X, fractional), self.top_term_numbers(n, by))

    def _read_counts(self, source: Any, fractional: bool) -> Counts:
        from paceline.workloads.topics.result.new_documents import read_matching_counts

        return read_matching_counts(self, source, fractional)

    def list_facts(self) -> list[str]:
        """Return sizes, loss, passes, why the fit ended, and its time, as far as they are known."""
        facts = [f"{self.k:,} topics", f"{len(self.L):,} documents", f"{self.F.shape[1]:,} terms"]
        facts += [f"loss {number(self.loss, 9)}"] * (not math.isnan(self.loss))
        reason = f" ({self.stopped_because})" * bool(self.stopped_because)
        facts += [f"{self.passes:,} passes{reason}"] * bool(self.passes)
        return facts + [duration(self.seconds)] * bool(self.seconds)

    def __repr__(self) -> str:
        return f"TopicFit({', '.join(self.list_facts())})"

    def _repr_html_(self) -> str:
        shares, terms, left = self.topic_shares(), self.top_terms(8), 'style="text-align:left"'
        rows = f"<tr><th>topic</th><th>share</th><th {left}>terms</th></tr>"
        for at in find_largest(shares, SHOWN_TOPICS).tolist():
            words = escape(escape_hidden(", ".join(terms[at])))
            rows += f"<tr><td>{at}</td><td>{100 * shares[at]:.1f} %</td><td {left}>{words}</td></tr>"
        more = f"<p>and {self.k - SHOWN_TOPICS} more topics</p>" if self.k > SHOWN_TOPICS else ""
        return f"<p>{escape(repr(self))}</p><table>{rows}</table>{more}"


def _compute_checksum(arrays: dict[str, np.ndarray], header: dict[str, str]) -> str:
    total = 0
    for name, array in sorted(arrays.items()):
        about = f"{name} {array.dtype} {array.shape}"
        total = zlib.crc32(np.ascontiguousarray(array).data, zlib.crc32(about.encode(), total))
    for name in sorted(header.keys() - {"sum"}):
        total = zlib.crc32(f"{name}={header[name]}".encode(), total)
    return f"{total:08x}"
