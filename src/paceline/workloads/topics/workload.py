"""Topics of documents, as a workload of a run file: the fit of paceline.topics on any number of ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import UserError
from paceline.layout import Layout
from paceline.spec import TopicsData, TopicsModel
from paceline.training.explain import shared_documents
from paceline.workload import FitEnd, Workload
from paceline.workloads.topics.blocks import Counts
from paceline.workloads.topics.engine import WINDOW, Fit, Stop
from paceline.workloads.topics.model import TopicFit
from paceline.workloads.topics.problem import Problem, check_topics, problem_of
from paceline.workloads.topics.start import sample

MOST_PASSES = 1000
MODEL_FILE = "model.safetensors"
SAVED = ("losses", "passes", "momentum", "residual", "moved", "turned", "has_before", "leaped")


class Topics(Workload):
    """Reads counts or texts, and fits."""

    Model, Data = TopicsModel, TopicsData
    fits = True

    @cached_property
    def counts(self) -> Counts:
        from paceline.workloads.topics.counts import read_counts
        from paceline.workloads.topics.documents import is_text
        from paceline.workloads.topics.shards import convert
        from paceline.workloads.topics.text import TextOptions

        data = self._data
        if data.path is None:
            raise UserError("data.path is missing: give the matrix, the shards or the texts, as  data.path=counts.npz")
        if not is_text(data.path):
            return read_counts(data.path, fractional=data.fractional)
        shards = data.cache.expanduser() / "topics" / self._name_of_texts(data.path)
        if not shards.exists():
            try:
                return convert(data.path, shards, text=TextOptions(**self._text()))
            except UserError:
                if not shards.exists():  # else another rank was faster
                    raise
        return read_counts(shards)

    def _name_of_texts(self, path: Path) -> str:
        """Texts are counted once, by whoever comes first; ranks then read the counts."""
        files = sorted(path.rglob("*.txt*")) if path.is_dir() else [path]
        files = [file for file in files if file.is_file()]
        described = [(str(file.absolute()), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
        return hashlib.sha256(json.dumps([described, self._text()]).encode()).hexdigest()[:24]

    def _text(self) -> dict[str, Any]:
        data = self._data
        return {"column": data.text, "min_df": data.min_df, "max_df": data.max_df, "max_terms": data.max_terms}

    def documents(self) -> int:
        return self.counts.documents

    def prepare(self, say: Callable[[str], None]) -> None:
        check_topics(self._model.k, self.counts)

    def suits(self, layout: Layout) -> None:
        if not layout.plain or self.spec.parallel.engine != "torch" or self.spec.parallel.reduce != "exact":
            raise UserError(
                "workload=topics spreads documents over ranks and nothing else; "
                "leave parallel.strategy, tensor, pipeline, engine and reduce out, and give parallel.ranks"
            )

    def fingerprint(self) -> str:
        """Of the shape and of a sample of the documents: a matrix may be too large to be read for its name."""
        counts = self.counts
        few = sample(counts, 0)
        digest = hashlib.sha256(f"{counts.documents} {counts.terms}".encode())
        for part in few.block(0, few.documents).parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def passes(self, device: Any) -> TopicPasses:
        counts = self.counts
        check_topics(self._model.k, counts)
        train, model = self.spec.train, self._model
        problem = problem_of(counts, device, fractional=self._data.fractional)
        most = train.steps or train.epochs or MOST_PASSES
        settings = {**model.model_dump(), "seed": train.seed, "text": self._text()}
        return TopicPasses(problem, settings, Stop(model.tolerance, passes=most))

    @property
    def _data(self) -> TopicsData:
        assert isinstance(self.spec.data, TopicsData)
        return self.spec.data

    @property
    def _model(self) -> TopicsModel:
        assert isinstance(self.spec.model, TopicsModel)
        return self.spec.model

    def model(self) -> nn.Module:
        raise UserError("workload=topics has no gradients; it is fitted, by  paceline train  or  paceline topics")


class TopicPasses:
    """The fit of one rank, as the loop of fits wants it."""

    def __init__(self, problem: Problem, settings: Mapping[str, Any], stop: Stop) -> None:
        self.problem, self.counts, self.settings, self.stop = problem, problem.counts, settings, stop
        self.samples, self.most, self.k = self.counts.documents, stop.passes, int(settings["k"])
        self._expected = stop.passes
        self.parameters = self.k * (self.counts.documents + self.counts.terms)
        self.final_loss = math.nan
        self.seconds = 0.0
        self._fit: Fit | None = None

    def begin(self) -> None:
        if self._fit is None:
            began = perf_counter()
            how, seed, rows = (self.settings[name] for name in ("start", "seed", "rows"))
            self._fit = self.problem.begin(self.k, start=how, seed=seed, rows=rows, stop=self.stop)
            self.seconds += perf_counter() - began

    @property
    def fit(self) -> Fit:
        assert self._fit is not None
        return self._fit

    @property
    def end(self) -> FitEnd | None:
        if self._fit is None or not self._fit.why_done:
            return None
        return FitEnd.CONVERGED if self._fit.converged else FitEnd.MOST_PASSES

    def end_words(self) -> str:
        return self.fit.why_done

    def step(self, flag: bool) -> dict[str, Any]:
        turn = self.fit.step(flag)
        self.seconds += turn.step_s
        if self.end is not None:
            self.final_loss = self.fit.final_loss()
        return {
            "loss": turn.loss,
            "gain": self._gain(),
            "residual": turn.residual,
            "accepted": turn.accepted,
            "of_samples": self._passes_expected() * self.samples,
            "step_s": turn.step_s,
            "data_s": turn.data_s,
            "comm_s": turn.comm_s,
            "exposed_s": turn.exposed_s,
            "flagged": turn.flagged,
        }

    def tensors(self) -> dict[str, Any]:
        fit = self.fit
        L, Ft = fit.result()
        state = {"model": {"L": self._whole(L), "F": Ft.T}, "fit": {"L": self._whole(fit.L), "F": fit.Ft.T}}
        if not self.counts.sparse:  # the loss of sparse ones is found at every pass on any device: the result is safe
            state["safe"] = {"L": self._whole(fit.L_safe), "F": fit.Ft_safe.T}
        return state

    def meta(self) -> dict[str, Any]:
        done = {"final_loss": self.final_loss if self.end is not None else None, "seconds": self.seconds}
        return done | {name: getattr(self.fit, name) for name in SAVED}

    def room(self) -> dict[str, Any]:
        L = torch.empty(len(self.problem.per_document), self.k, device=self.problem.device)
        Ft = torch.empty(self.counts.terms, self.k, device=self.problem.device)
        self._fit = self.problem.at(L, Ft, rows=self.settings["rows"], stop=self.stop)
        if not self.counts.sparse:
            self._fit.L_safe, self._fit.Ft_safe = L.clone(), Ft.clone()
        return self.tensors()

    def restored(self, meta: Mapping[str, Any]) -> None:
        self.final_loss, self.seconds = meta["final_loss"] or math.nan, meta["seconds"]
        for name in SAVED:
            setattr(self.fit, name, meta[name])

    def equations(self, ranks: int) -> list[str]:
        product = f"({self.samples:,} × {self.k}) ({self.k} × {self.counts.terms:,})"
        return [f"{self.samples:,} × {self.counts.terms:,} counts ≈ {product}", shared_documents(self.samples, ranks)]

    def conclude(self, result: Mapping[str, Tensor], folder: Path) -> None:
        counts, fit = self.counts, self.fit
        TopicFit(
            L=result["L"].numpy(),
            F=result["F"].numpy(),
            losses=list(fit.losses),
            loss=self.final_loss,
            terms=None if counts.vocabulary is None else list(counts.vocabulary),
            names=None if counts.names is None else list(counts.names),
            passes=fit.passes,
            converged=fit.converged,
            stopped_because=fit.why_done,
            seconds=self.seconds,
            settings=dict(self.settings),
        ).save(folder / MODEL_FILE)

    def _whole(self, L: Tensor) -> Tensor:
        """Rows of this rank as a part of all rows: a checkpoint puts them together, for any number of ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return L
        mesh = init_device_mesh(L.device.type, (dist.get_world_size(),))
        shape = (self.samples, L.shape[1])
        return DTensor.from_local(L, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))

    def _gain(self) -> float | None:
        losses = self.fit.losses
        return (losses[-2] - losses[-1]) / self.fit.check / abs(losses[-1]) if len(losses) > 1 else None

    def _passes_expected(self) -> int:
        """How many passes there will be in all, if the gain goes on falling as it did."""
        losses, done = self.fit.losses, self.fit.passes
        if self.fit.why_done:
            return done
        window, between = self.fit.window, self.fit.window * self.fit.check
        if len(losses) > 2 * window and self.fit.stop.gain:
            gains = [(losses[-1 - window - at] - losses[-1 - at]) / between / abs(losses[-1]) for at in (window, 0)]
            if 0 < gains[1] < gains[0]:  # else what was expected before stands
                left = between * math.log(self.fit.stop.gain / gains[1]) / math.log(gains[1] / gains[0])
                self._expected = min(self.most, done + max(1, math.ceil(left)))
        return max(self._expected, min(self.most, done + WINDOW))
