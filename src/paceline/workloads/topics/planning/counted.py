"""Counts of a topic model as the planner sees them: how many there are, how they are kept, how they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UserError
from paceline.record.units import count, size
from paceline.spec import RunSpec
from paceline.workloads.topics.sizes import INDEX_BYTES, POINTER_BYTES, SPARSE_BELOW

USUAL_TERMS = 100_000
"""Where neither the counts nor data.max_terms say."""


@dataclass(frozen=True)
class Counted:
    """Documents by terms, and the topics that they are to have."""

    documents: int
    terms: int
    k: int
    nonzeros: float
    """Counts that a pass works on: where dense, all of them."""
    sparse: bool
    element_bytes: int
    """Of a count, as it is worked on."""
    stored_bytes: float
    """Of all counts, where they lie."""
    resident: bool
    """Read whole by every rank, as .npz and .mtx are; otherwise a rank reads its own documents."""
    newton: bool = False

    @property
    def per_document(self) -> float:
        return self.nonzeros / self.documents

    @property
    def document_bytes(self) -> float:
        """Of one document, as it is worked on."""
        if self.sparse:
            return POINTER_BYTES + self.per_document * (INDEX_BYTES + self.element_bytes)
        return float(self.terms * self.element_bytes)

    def words(self) -> str:
        kept = f"{count(self.nonzeros, 'G')} nonzeros" if self.sparse else f"dense, {8 * self.element_bytes} bits each"
        held = size(self.documents * self.document_bytes)
        return f"{self.documents:,} documents × {self.terms:,} terms ({kept}, {held}), {self.k} topics"


def counted(spec: RunSpec, documents: int | None, words: float | None) -> tuple[Counted, list[str]]:
    """The counts of a run file and what was assumed of them; `documents` and their mean `words` stand in for data."""
    _spreads_documents_only(spec)
    model: Any = spec.model
    if documents is not None:
        return _supposed(spec, documents, words)
    if words is not None:
        raise UserError("--tokens: words are counted in the data; give --samples DOCUMENTS too, to plan without them")
    found = _read(spec.data)
    if model.k > min(found.documents, found.terms):
        raise UserError(
            f"model.k={model.k} topics for {found.documents:,} documents and {found.terms:,} terms: "
            f"give at most {min(found.documents, found.terms)}"
        )
    nonzeros = float(found.weights().sum()) if found.sparse else float(found.documents) * found.terms
    read = Counted(
        documents=found.documents,
        terms=found.terms,
        k=model.k,
        nonzeros=nonzeros,
        sparse=found.sparse,
        element_bytes=found.block(0, 1).counts.dtype.itemsize,
        stored_bytes=float(found.stored_bytes),
        resident=found.resident,
        newton=model.rows == "newton",
    )
    return read, []


def _read(data: Any) -> Any:
    from paceline.workloads.topics.files.reading import read_counts
    from paceline.workloads.topics.files.texts import TextOptions

    if data.path is None:
        raise UserError(
            "data.path is missing: give the counts, as  data.path=counts.npz,  or plan without them by  "
            "--samples DOCUMENTS [--tokens WORDS_PER_DOCUMENT]"
        )
    return read_counts(data.path, fractional=data.fractional, text=TextOptions(**data.text_options()))


def _supposed(spec: RunSpec, documents: int, words: float | None) -> tuple[Counted, list[str]]:
    model: Any = spec.model
    data: Any = spec.data
    terms = data.max_terms or USUAL_TERMS
    told = [] if data.max_terms else [f"{terms:,} terms (data.max_terms=N says otherwise)"]
    share = 1.0
    if words is None:
        told.append("dense counts of 8 bits; short documents have fewer, say it with  --tokens WORDS")
    else:
        share = 1 - math.exp(-words / terms)  # as if all terms were alike: text repeats itself, and has fewer
        told.append(f"{terms * share:,.0f} different terms in a document of {words:,.0f} words, at most")
    sparse = share < SPARSE_BELOW
    each = terms * share if sparse else float(terms)
    found = Counted(
        documents=documents,
        terms=terms,
        k=model.k,
        nonzeros=documents * each,
        sparse=sparse,
        element_bytes=1,
        stored_bytes=0.0,
        resident=False,
        newton=model.rows == "newton",
    )
    return replace(found, stored_bytes=documents * found.document_bytes), told


def _spreads_documents_only(spec: RunSpec) -> None:
    parallel = spec.parallel
    split = parallel.tensor * parallel.pipeline > 1 or parallel.offload
    if parallel.strategy not in ("auto", "single", "ddp") or split or parallel.reduce != "exact":
        raise UserError(
            "workload=topics spreads documents over ranks and nothing else; "
            "leave parallel.strategy, tensor, pipeline, offload and reduce out, and give parallel.ranks"
        )
