"""The ranks of a run, joined by XGBoost's own network, over which it sums histograms."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.launch.environment import LOCALHOST, Place
from paceline.launch.group import from_main
from paceline.launch.network import address_towards, kept_on_loopback


class Network:
    """Up from `join` to `leave`. While it is up even making a matrix is work for all ranks: leave before one rank does
    something alone."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place, self.timeout_s = place, timeout_s
        self._up = ExitStack()
        self._tracker: Any = None

    def join(self) -> None:
        """Each rank listens for word that another failed, and ends when told so, by whomever: on all interfaces, if it
        were left to XGBoost."""
        if self.place.world == 1:
            return
        from xgboost import collective

        meeting = from_main(self._meeting)
        own = {"dmlc_task_id": f"{self.place.rank:08d}", "dmlc_timeout": max(1, round(self.timeout_s))}
        with _unheard(), self.failures(), kept_on_loopback(self.place):
            self._up.enter_context(collective.CommunicatorContext(**meeting, **own))
        assert collective.get_rank() == self.place.rank

    def _meeting(self) -> dict[str, Any]:
        """Where the ranks meet: on the loopback, or at an address of the main rank's host that the others can reach."""
        from xgboost.tracker import RabitTracker

        several = self.place.local_world < self.place.world
        host = address_towards(self.place.address) if several else LOCALHOST
        self._tracker = RabitTracker(host_ip=host, n_workers=self.place.world, sortby="task")
        self._tracker.start()
        return dict(self._tracker.worker_args())

    def any(self, flag: bool) -> bool:
        """Whether a rank says so."""
        if self.place.world == 1:
            return flag
        from xgboost import collective

        with self.failures():
            return bool(collective.allreduce(np.array([flag], np.int32), collective.Op.MAX)[0])

    def leave(self) -> None:
        self._up.close()
        if self._tracker is not None:
            self._tracker.wait_for()
            self._tracker = None

    @contextmanager
    def failures(self) -> Iterator[None]:
        """What XGBoost reports of a peer that is gone is an error of the connection, and said as such."""
        from xgboost.core import XGBoostError

        try:
            yield
        except XGBoostError as error:
            if self.place.world == 1:
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = next((line for line in lines if "timed out" in line), lines[0] if lines else "")
            raise RuntimeError(f"connection closed by peer: {said}") from None


@contextmanager
def _unheard() -> Iterator[None]:
    """Who was given which rank, XGBoost's thread tells standard output, however quiet it is asked to be."""
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
