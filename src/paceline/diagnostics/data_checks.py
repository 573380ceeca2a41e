"""The data of a run file: are batches made as fast as a device takes them?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from paceline.config import RunSpec
from paceline.diagnostics.results import CheckContext, CheckResult, Health
from paceline.errors import PacelineError
from paceline.io.format import number

DATA_TOPIC = "data"
MEASURED_S = 1.0
MAX_BATCHES = 200


def check_loading(here: CheckContext) -> Iterator[CheckResult]:
    """Of one rank, by the thread or the worker processes that the run would have."""
    if here.spec is None:
        yield CheckResult(DATA_TOPIC, "loading", "no run file given", "", Health.NOT_HERE, "paceline doctor RUN.yaml")
        return
    from paceline.workload import Workload, build_workload

    try:
        workload = build_workload(here.spec)
        if not isinstance(workload, Workload):
            yield CheckResult(DATA_TOPIC, "loading", f"{here.spec.workload} has no batches", "", Health.NOT_HERE)
            return
        workload.prepare(lambda text: None)
        rate = _measure_samples_s(here.spec, workload)
    except PacelineError as error:
        yield CheckResult(DATA_TOPIC, "loading", str(error), "data that can be read", Health.WRONG)
        return
    needed = _plan_samples_s(here.spec)
    yield CheckResult(
        *(DATA_TOPIC, "loading", f"{number(rate, 3)} samples/s by one rank"),
        f"{number(needed, 3)} samples/s, which one device takes by the plan" if needed else "",
        Health.LOOK if needed and rate < needed else Health.OK,
        "data.workers=4  makes samples in processes of their own; or store them in the form the model takes",
    )


def _measure_samples_s(spec: RunSpec, workload: object) -> float:
    """The first batches of the run, made one after the other; the first, which opens files, is not counted."""
    from paceline.data.order import Order
    from paceline.data.prefetch import Loader, make_collate
    from paceline.data.samples import load_training_samples
    from paceline.data.workers import start_workers
    from paceline.launch.environment import SINGLE_RANK
    from paceline.layout import layout_of
    from paceline.workload import Workload

    assert isinstance(workload, Workload)
    layout = layout_of(spec)
    with start_workers(workload, SINGLE_RANK, -(-layout.global_batch // layout.data)):
        samples = load_training_samples(workload)
        order = Order.of(spec.train, len(samples))
        loader = Loader(samples, order, layout, 0, make_collate(samples.batch, False))
        batches = iter(loader.prefetch(0, MAX_BATCHES))
        next(batches)
        made, began = 0, time.perf_counter()
        for batch in islice(batches, MAX_BATCHES - 1):
            made += -(-batch.samples // layout.data)
            if time.perf_counter() - began > MEASURED_S:
                break
        took = time.perf_counter() - began
    return made / max(took, 1e-9)


def _plan_samples_s(spec: RunSpec) -> float | None:
    """What one device goes through, by the plan; None where that cannot be planned."""
    from paceline.planner.plan import plan

    try:
        found = plan(spec, devices=(1,))
    except PacelineError:
        return None
    return found.cost_model.global_batch / found.base.step_s if found.base is not None else None
