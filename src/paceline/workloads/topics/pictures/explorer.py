"""The topic explorer: one HTML file that opens offline, with the topics, their terms and their documents inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.record.files import write_atomic
from paceline.record.units import duration, number
from paceline.workloads.topics.counts.totals import totals
from paceline.workloads.topics.pictures.explorer_documents import ShownDocuments, documents_shown, stripes
from paceline.workloads.topics.pictures.explorer_map import overlaps, placed
from paceline.workloads.topics.pictures.plots import PALETTE
from paceline.workloads.topics.result.model import TopicFit
from paceline.workloads.topics.result.quality import coherence
from paceline.workloads.topics.result.relevance import BY_LIFT, largest, overall, ranked

ASSETS = Path(__file__).parent / "assets"
WEIGHTS = (1.0, 0.8, 0.6, 0.4, 0.2, BY_LIFT)
TERMS_PER_WEIGHT = 40
SEARCHED_TERMS = 20_000
USES, LEAST_USE = 6, 0.03
SIMILAR = 6
PRINTED_TERMS = 12
NAMING = 0.3  # the weight of log p for the terms that name a topic; explorer.js has the same


def write_explorer(
    model: Any, path: str | Path, X: Any = None, names: Sequence[str] | None = None, *, title: str = "Topics"
) -> Path:
    """Write the explorer of a fit. With the counts X it also knows lengths, coherence and the terms of documents."""
    fitted: TopicFit = getattr(model, "fit_", model)
    if not isinstance(fitted, TopicFit):
        raise UserError(
            f"a {type(model).__name__} is no fit: give what  paceline.topics.fit  or  TopicFit.load  returns"
        )
    where = Path(path).expanduser()
    if where.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{str(where)!r} does not end in .html; write it as  {where.with_suffix('.html')}")
    write_atomic(where, page(fitted, X, names, title).encode("utf-8", "replace"))
    return where


def page(model: TopicFit, X: Any = None, names: Sequence[str] | None = None, title: str = "Topics") -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    data = contents(model, X, names)
    rows = [(at, data["shares"][at], _line(data, at)) for at in np.argsort(-np.array(data["shares"]), kind="stable")]
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(asset("explorer.html.j2"))
    return made.render(
        title=title,
        facts=_facts(model),
        rows=rows,
        data=Markup(text.replace("<", "\\u003c").replace("&", "\\u0026")),
        style=Markup(asset("explorer.css")),
        script=Markup(asset("explorer.js")),
    )


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def contents(model: TopicFit, X: Any = None, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything that the page shows: of each topic the first terms and documents, never the matrices."""
    if names is not None and len(names) != len(model.L):
        raise UserError(f"{len(names):,} names for {len(model.L):,} documents: give one for each")
    counts = None if X is None else model._counts(X, fractional=True)
    if counts is not None and counts.documents != len(model.L):
        raise UserError(
            f"X has {counts.documents:,} documents and the fit {len(model.L):,}: give the documents of the fit"
        )
    sums = None if counts is None else totals(counts)
    shares = model.topic_shares(None if sums is None else sums.per_document)
    everywhere = overall(model.F, shares)
    firsts = ranked(model.F, everywhere, TERMS_PER_WEIGHT, WEIGHTS)
    tops = [np.unique(np.concatenate([by[topic] for by in firsts])) for topic in range(model.k)]
    documents = documents_shown(model, counts, sums, everywhere, names)
    used = np.unique(np.concatenate([*tops, largest(everywhere, SEARCHED_TERMS), documents.all_terms]))
    place = np.full(model.F.shape[1], -1, np.int64)
    place[used] = np.arange(len(used))
    overlap = overlaps(model.F)
    spots, radii = placed(overlap, shares)
    company = None if counts is None or model.F.shape[1] < 2 else coherence(counts, [by[:10] for by in firsts[0]])
    return {
        "k": model.k,
        "documents": len(model.L),
        "terms": int(model.F.shape[1]),
        "byWords": sums is not None,
        "shares": [_short(v) for v in shares],
        "coherence": None if company is None else [round(float(v), 3) for v in company],
        "spots": np.column_stack([spots, radii]).round(4).tolist(),
        "similar": _similar(overlap),
        "vocabulary": [model.term(at) for at in used],
        "everywhere": [_short(v) for v in everywhere[used]],
        "uses": _uses(model.F, shares, everywhere, used),
        "tops": [
            [place[terms].tolist(), [_short(v) for v in model.F[topic, terms]]] for topic, terms in enumerate(tops)
        ],
        "colours": PALETTE,
        "stripes": stripes(model.L),
        **_of_documents(documents, place),
    }


def _of_documents(shown: ShownDocuments, place: np.ndarray) -> dict[str, Any]:
    return {
        "names": shown.names,
        "lengths": shown.lengths,
        "mixtures": shown.mixtures,
        "documentTerms": None if shown.terms is None else [place[terms].tolist() for terms in shown.terms],
        "topDocuments": shown.tops,
    }


def _similar(overlap: np.ndarray) -> list[list[list[float]]]:
    """For each topic the nearest others: (topic, overlap)."""
    found = []
    for topic, row in enumerate(overlap):
        near = [at for at in largest(row, SIMILAR + 1).tolist() if at != topic][:SIMILAR]
        found.append([[at, round(float(row[at]), 3)] for at in near])
    return found


def _uses(F: np.ndarray, shares: np.ndarray, everywhere: np.ndarray, used: np.ndarray) -> list[list[int]]:
    """For each term the topics that its use is in, each with how many in a hundred: topic, share, topic, share."""
    found: list[list[int]] = []
    for start in range(0, len(used), 4096):
        terms = used[start : start + 4096]
        within = F[:, terms] * shares[:, None] / np.maximum(everywhere[terms], 1e-30)
        most = min(USES, len(F))
        firsts = np.argpartition(-within, most - 1, axis=0)[:most] if most < len(F) else np.argsort(-within, axis=0)
        for column, topics in enumerate(firsts.T):
            part = within[topics, column]
            order = np.argsort(-part, kind="stable")
            kept = [(int(topics[at]), round(100 * float(part[at]))) for at in order if part[at] >= LEAST_USE]
            found.append([value for pair in kept for value in pair])
    return found


def _line(data: dict[str, Any], topic: int) -> str:
    """The terms that name a topic, for the printed table: neither the commonest nor the rarest."""
    places, p = data["tops"][topic]
    everywhere = np.array([data["everywhere"][at] for at in places])
    score = np.log(np.maximum(p, 1e-30)) - (1 - NAMING) * np.log(np.maximum(everywhere, 1e-30))
    return ", ".join(data["vocabulary"][places[at]] for at in largest(score, PRINTED_TERMS))


def _facts(model: TopicFit) -> list[str]:
    facts = [f"{model.k:,} topics", f"{len(model.L):,} documents", f"{model.F.shape[1]:,} terms"]
    if model.loss == model.loss:
        facts.append(f"loss {number(model.loss, 9)}")
    if model.passes:
        facts.append(f"{model.passes:,} passes{', converged' if model.converged else ''}")
    if model.seconds:
        facts.append(duration(model.seconds))
    return facts


def _short(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")
