"""The topic explorer: one HTML file that opens offline, with the topics, their terms and their documents."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidValue
from paceline.io.files import write_atomic
from paceline.io.html_page import build_content_policy, compile_template, dump_page_data
from paceline.workloads.topics.counts.stream import compute_totals
from paceline.workloads.topics.files.texts import strip_markup
from paceline.workloads.topics.result.model import (
    BY_LIFT,
    TopicFit,
    average_neighbours,
    find_largest,
    rank_terms,
    sort_documents,
)
from paceline.workloads.topics.result.new_documents import compute_coherence
from paceline.workloads.topics.result.plots import PALETTE

ASSETS = Path(__file__).parent / "assets"
WEIGHTS = (1.0, 0.8, 0.6, 0.4, 0.2, BY_LIFT)
TERMS_PER_WEIGHT = 40
SEARCHED_TERMS = 20_000
USES, LEAST_USE = 6, 0.03
SIMILAR = 6
PRINTED_TERMS = 12
PER_TOPIC, ALL_UP_TO = 8, 5_000  # documents that are shown: in each list of a topic, or all of a small collection
BETWEEN, PER_PAIR = 0.25, 2  # least share of two topics in a document between them, and such documents of a pair
MOST_IN_MIXTURE, LEAST_SHARE = 12, 0.01
LONGEST_NAME, LONGEST_TEXT = 200, 240
STRIPES, STRIPE_TOPICS = 320, 12


def write_explorer(
    model: Any,
    path: str | Path,
    X: Any = None,
    *,
    title: str | None = None,
    texts: Iterable[str] | None = None,
) -> Path:
    """Write the explorer of a fit; X adds coherence and lengths of documents, `texts` their beginnings."""
    fitted: TopicFit = getattr(model, "fit_", model)
    if not isinstance(fitted, TopicFit):
        message = f"a {type(model).__name__} is not a fit: give the result of  paceline.topics.fit  or  TopicFit.load"
        raise InvalidValue(message, key="model")
    file = Path(path).expanduser()
    data = collect_explorer_data(fitted, X, texts)
    write_atomic(file, render_explorer(fitted, data, title).encode("utf-8", "replace"))
    return file


def render_explorer(model: TopicFit, data: dict[str, Any], title: str | None = None) -> str:
    """Return the page with what `collect_explorer_data` found."""
    from markupsafe import Markup

    company = data["coherence"] or [None] * model.k
    names, shares = data.pop("printed"), data["shares"]
    rows = [(at, shares[at], company[at], names[at]) for at in np.argsort(-np.array(shares), kind="stable")]
    template, style, script = ((ASSETS / f"explorer.{kind}").read_text("utf-8") for kind in ("html.j2", "css", "js"))
    return compile_template(template).render(
        title=title or f"{model.k:,} topics in {len(model.L):,} documents",
        facts=model.list_facts(),
        rows=rows,
        data=Markup(dump_page_data(data)),
        style=Markup(style),
        script=Markup(script),
        policy=Markup(build_content_policy(script)),
    )


def collect_explorer_data(model: TopicFit, X: Any = None, texts: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the data of the page: top terms and documents of each topic, never the matrices."""
    counts = None if X is None else model._read_counts(X, fractional=True)
    if counts is not None and counts.documents != len(model.L):
        message = f"X has {counts.documents:,} documents and the fit {len(model.L):,}: give the documents of the fit"
        raise InvalidValue(message, key="X")
    lengths = None if counts is None else compute_totals(counts).per_document
    shares = model.topic_shares(lengths)
    everywhere = shares @ model.F
    firsts = rank_terms(model.F, everywhere, TERMS_PER_WEIGHT, WEIGHTS)
    tops = [np.unique(np.concatenate([by[topic] for by in firsts])) for topic in range(model.k)]
    documents = _collect_documents(model, lengths)
    shown = documents.pop("shown")
    used = np.unique(np.concatenate([*tops, find_largest(everywhere, SEARCHED_TERMS)]))
    place = np.full(model.F.shape[1], -1, np.int64)
    place[used] = np.arange(len(used))
    overlap = compute_overlaps(model.F)
    stripes = average_neighbours(model.L, sort_documents(model.L), STRIPES)
    company = None
    if counts is not None and model.F.shape[1] > 1:
        company = compute_coherence(counts, [by[:10] for by in firsts[0]])
    return {
        "k": model.k,
        "documents": len(model.L),
        "terms": int(model.F.shape[1]),
        "byWords": lengths is not None,
        "shares": _round_short(shares),
        "labels": model.topic_names(lengths),
        "printed": model.topic_names(lengths, PRINTED_TERMS),
        "coherence": None if company is None else [round(float(v), 3) for v in company],
        "similar": [_list_similar_topics(row, topic) for topic, row in enumerate(overlap)],
        "vocabulary": [model.term(at) for at in used],
        "everywhere": _round_short(everywhere[used]),
        "uses": _list_term_uses(model.F, shares, everywhere, used),
        "tops": [[place[at].tolist(), _round_short(p[at])] for p, at in zip(model.F, tops, strict=True)],
        "colours": PALETTE,
        # topics in order, so that neighbours line up
        "stripes": [_in_thousandths(mean, np.sort(find_largest(mean, STRIPE_TOPICS))) for mean in stripes],
        **documents,
        "texts": None if texts is None else _read_beginnings(texts, shown),
    }


def _list_similar_topics(row: np.ndarray, topic: int) -> list[list[float]]:
    near = [at for at in find_largest(row, SIMILAR + 1).tolist() if at != topic][:SIMILAR]
    return [[at, round(float(row[at]), 3)] for at in near]


def _list_term_uses(F: np.ndarray, shares: np.ndarray, everywhere: np.ndarray, used: np.ndarray) -> list[list[int]]:
    within = F[:, used] * shares[:, None] / np.maximum(everywhere[used], 1e-30)
    firsts = np.argsort(-within, axis=0, kind="stable")[:USES]
    found = []
    for topics, parts in zip(firsts.T.tolist(), np.take_along_axis(within, firsts, axis=0).T.tolist(), strict=True):
        kept = [(topic, round(100 * part)) for topic, part in zip(topics, parts, strict=True) if part >= LEAST_USE]
        found.append([value for pair in kept for value in pair])
    return found


def _round_short(values: np.ndarray, digits: int = 3) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


def compute_overlaps(F: np.ndarray) -> np.ndarray:
    """Return (k, k) sums over terms of sqrt(p q): 1 for the same topic, 0 for topics without a common term."""
    roots = np.sqrt(np.maximum(F, 0), dtype=np.float32)
    return np.minimum((roots @ roots.T).astype(np.float64), 1.0)


def _collect_documents(model: TopicFit, lengths: np.ndarray | None) -> dict[str, Any]:
    """List every document of a small collection, or the top ones of each topic."""
    firsts, between = _choose_documents(model.L, np.ones(len(model.L)) if lengths is None else lengths)
    chosen = np.unique(np.concatenate([*firsts, *between]))
    shown = np.arange(len(model.L)) if len(model.L) <= ALL_UP_TO else chosen
    return {
        "shown": shown,
        "names": [model.document(at)[:LONGEST_NAME] for at in shown.tolist()],
        "lengths": None if lengths is None else _round_short(lengths[shown], 6),
        "mixtures": [_in_thousandths(row, find_largest(row, MOST_IN_MIXTURE)) for row in model.L[shown]],
        "topDocuments": [np.searchsorted(shown, found).tolist() for found in firsts],
        "between": [np.searchsorted(shown, found).tolist() for found in between],
    }


def _choose_documents(L: np.ndarray, lengths: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for each topic the documents that speak for it most, and those between it and another topic.

    A document speaks for a topic by its words beyond those of its next topic: a long one tells more than a short one
    of nothing else.
    """
    n, k = L.shape
    order = np.argsort(-L, axis=1, kind="stable")[:, :2]
    first, second = order[:, 0], order[:, -1]
    less = L[np.arange(n), second] * (k > 1)
    ahead = (L[np.arange(n), first] - less) * lengths
    firsts, between = [], []
    for topic in range(k):
        own = np.flatnonzero(first == topic)
        firsts.append(own[find_largest(ahead[own], PER_TOPIC)])
        near = np.flatnonzero((less >= BETWEEN) & ((first == topic) | (second == topic)))
        taken: list[int] = []
        for at in near[np.argsort(-less[near] * np.sqrt(lengths[near]), kind="stable")].tolist():
            pair = {first[at], second[at]}
            if len(taken) < PER_TOPIC and sum({first[x], second[x]} == pair for x in taken) < PER_PAIR:
                taken.append(at)
        between.append(np.array(taken, np.int64))
    return firsts, between


def _read_beginnings(texts: Iterable[str], shown: np.ndarray) -> list[str]:
    found, wanted = [], set(shown.tolist())
    for text in (text for at, text in enumerate(texts) if at in wanted):
        words = " ".join(strip_markup(text[: 4 * LONGEST_TEXT]).split())
        found.append(words if len(words) <= LONGEST_TEXT else words[:LONGEST_TEXT].rsplit(" ", 1)[0] + " …")
    return found


def _in_thousandths(shares: np.ndarray, topics: np.ndarray) -> list[int]:
    return [n for at in topics if shares[at] >= LEAST_SHARE for n in (int(at), round(1000 * float(shares[at])))]
