"""Topic models as a workload of a run file: the fit of paceline.topics on any number of ranks."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from paceline.config import RunSpec
from paceline.data.cache import prepare_entry
from paceline.errors import UserError
from paceline.io.files import expand_cache, read_text
from paceline.launch.process_group import create_device_mesh
from paceline.layout import Layout
from paceline.trainer.explain import describe_sharing
from paceline.workload import FitEnd, LogFn, Passes, PassWorkload, ignore_log
from paceline.workloads.topics.counts.matrices import Counts
from paceline.workloads.topics.files.reading import convert, read_counts
from paceline.workloads.topics.files.shards import ShardCounts, read_shards
from paceline.workloads.topics.files.texts import WORDS, TextOptions, is_text
from paceline.workloads.topics.fitting.problem import FitProblem, build_problem, check_topics, sample_documents
from paceline.workloads.topics.result.model import MODEL_FILE, TopicFit
from paceline.workloads.topics.sections import FitOptions, TopicsData, TopicsModel
from paceline.workloads.topics.sizes import DEFAULT_PASSES

MAX_DONE = 0.98
SAVED = ("losses", "passes", "momentum", "residual", "moved", "turned", "has_before", "leaped", "drift", "drifted")


class Topics(PassWorkload):
    Model, Data = TopicsModel, TopicsData

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._model, self._data = cast(TopicsModel, spec.model), cast(TopicsData, spec.data)

    @cached_property
    def counts(self) -> Counts:
        data = self._data
        if data.path is None:
            message = "data.path is missing: give it as  data.path=counts.npz"
            raise UserError(message, code="missing-value", key="data.path")
        if not is_text(data.path):
            return read_counts(data.path, fractional=data.fractional)
        return self._count_texts(data.path, ignore_log, verify=False)

    def _count_texts(self, path: Path, log: LogFn, verify: bool) -> ShardCounts:
        """Count texts once, into the cache; ranks then read the counts."""
        entry = expand_cache(self._data.cache) / "topics" / self._hash_texts(path)

        def read(entry: Path, verify: bool) -> ShardCounts:
            counts = read_shards(entry)
            if verify:
                counts.verify()
            return counts

        def build(folder: Path) -> None:
            convert(path, folder, text=TextOptions(**self._data.text_options()))

        return prepare_entry(entry, read, build, log, verify)

    def _hash_texts(self, path: Path) -> str:
        files = sorted(path.rglob("*.txt*")) if path.is_dir() else [path]
        files = [file for file in files if file.is_file()]
        described = [(str(file.absolute()), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
        options = self._data.text_options()
        if (stop := Path(options["stop_words"]).expanduser()).is_file():
            options["stop_words"] = read_text(stop)
        return hashlib.sha256(json.dumps([described, options, WORDS.pattern]).encode()).hexdigest()[:24]

    def sample_count(self) -> int:
        return self.counts.documents

    def prepare(self, log: LogFn) -> None:
        if self._data.path is not None and is_text(self._data.path):
            log(TextOptions(**self._data.text_options()).rules())
            self.counts = self._count_texts(self._data.path, log, verify=True)
        check_topics(self._model.k, self.counts)

    def suits(self, layout: Layout) -> None:
        if not layout.plain or self.spec.parallel.engine != "torch" or self.spec.parallel.reduce != "exact":
            message = "workload=topics only spreads documents over ranks: of the section parallel give ranks alone"
            raise UserError(message, code="not-supported", key="parallel")

    def fingerprint(self) -> str:
        """Hash the shape and a sample of the documents: a matrix may be too large to be read for a hash."""
        counts = self.counts
        few = sample_documents(counts, 0)
        digest = hashlib.sha256(f"{counts.documents} {counts.terms}".encode())
        for part in few.block(0, few.documents).parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def passes(self, device: Any) -> "TopicPasses":
        counts = self.counts
        check_topics(self._model.k, counts)
        train, asked = self.spec.train, self._model.model_dump()
        settings = {**asked, "seed": train.seed, "text": self._data.text_options()}
        k = asked.pop("k")
        options = FitOptions(**asked, seed=train.seed, passes=train.steps or train.epochs or DEFAULT_PASSES)
        return TopicPasses(build_problem(counts, device), k, options, settings)


class TopicPasses(Passes):
    def __init__(self, problem: FitProblem, k: int, options: FitOptions, settings: Mapping[str, Any]) -> None:
        self.problem, self.counts, self.k, self.options, self.settings = problem, problem.counts, k, options, settings
        self.samples, self.most = self.counts.documents, options.passes
        self.parameters = self.k * (self.counts.documents + self.counts.terms)
        self.final_loss, self.seconds, self._share_done = math.nan, 0.0, 0.0
        self.fit: Any = None  # an AcceleratedEM, once it has begun or is restored

    def begin(self) -> None:
        if self.fit is None:
            began = perf_counter()
            self.fit = self.problem.begin(self.k, self.options)
            self.seconds += perf_counter() - began

    @property
    def end(self) -> FitEnd | None:
        return None if self.fit is None else self.fit.end

    def end_words(self) -> str:
        return str(self.fit.end_words())

    def step(self, flag: bool) -> dict[str, Any]:
        done = self.fit.step(flag)
        self.seconds += done.step_s
        if self.end is not None:
            self.final_loss = self.fit.final_loss()
        gain = self.fit.gain(1) if len(self.fit.losses) > 1 else None
        return {"loss": done.loss, "gain": gain, "of_samples": self._estimate_passes() * self.samples, **asdict(done)}

    def tensors(self) -> dict[str, Any]:
        fit = self.fit
        L, Ft = fit.result()
        state = {
            "model": {"L": self._as_shard(L), "F": Ft.T},
            "fit": {"L": self._as_shard(fit.L), "F": fit.Ft.T},
            "earlier": {"F": fit.Ft_earlier.T},
        }
        if not self.counts.sparse:  # of sparse counts the loss is known at every pass, so the result is safe
            state["safe"] = {"L": self._as_shard(fit.L_safe), "F": fit.Ft_safe.T}
        return state

    def meta(self) -> dict[str, Any]:
        done = {"final_loss": self.final_loss if self.end else None, "seconds": self.seconds}
        return done | {name: getattr(self.fit, name) for name in SAVED}

    def allocate_state(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        L = torch.empty(len(self.problem.per_document), self.k, device=self.problem.device)
        Ft = torch.empty(self.counts.terms, self.k, device=self.problem.device)
        self.fit = self.problem.resume_at(L, Ft, self.options)
        if not self.counts.sparse:
            self.fit.L_safe, self.fit.Ft_safe = L.clone(), Ft.clone()
        self.fit.Ft_earlier = Ft.clone()
        return {name: room for name, room in self.tensors().items() if name != "earlier" or "drift" in meta}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        self.final_loss, self.seconds = meta["final_loss"] or math.nan, meta["seconds"]
        for name in (name for name in SAVED if name in meta):
            setattr(self.fit, name, meta[name])

    def equations(self, ranks: int) -> list[str]:
        product = f"({self.samples:,} × {self.k}) ({self.k} × {self.counts.terms:,})"
        return [
            f"{self.samples:,} × {self.counts.terms:,} counts ≈ {product}",
            describe_sharing(self.samples, ranks, "documents"),
        ]

    def conclude(self, result: Mapping[str, Tensor], folder: Path) -> None:
        factors, settings = (result["L"].numpy(), result["F"].numpy()), dict(self.settings)
        made = TopicFit.of(self.fit, self.counts, factors, self.final_loss, self.seconds, settings)
        made.save(folder / MODEL_FILE)

    def _as_shard(self, L: Tensor) -> Tensor:
        """Return this rank's rows as a shard of all rows: a checkpoint merges them, for any number of ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return L
        mesh, k = create_device_mesh(L.device.type, (dist.get_world_size(),)), L.shape[1]
        shape = torch.Size((self.samples, k))
        return DTensor.from_local(L, mesh, [Shard(0)], run_check=False, shape=shape, stride=(k, 1))

    def _estimate_passes(self) -> float:
        """Estimate the number of passes from how far gain and drift have fallen, on a log scale."""
        fit, done = self.fit, self.fit.passes
        if fit.end is not None:
            return done
        shares = [done / self.most]
        if len(fit.losses) > 2 * fit.window and 0 < self.options.tolerance < (first := fit.first_gain):
            gain = max(fit.gain(fit.window), self.options.tolerance)
            shares.append(math.log(first / gain) / math.log(first / self.options.tolerance))
        if fit.drift < 1 and self.options.steady:
            shares.append(math.log(fit.drift) / math.log(self.options.steady))
        self._share_done = min(MAX_DONE, max(self._share_done, *shares))
        return done / self._share_done
