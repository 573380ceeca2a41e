"""First on the path of a run, its clock jumps: by a day, back or forth, after some of the times it was read."""

import os
import time

_read, _reads = time.time, [0]
_after, _by_s = map(int, os.environ.get("CLOCK_JUMPS", "0 0").split())


def _jumping() -> float:
    _reads[0] += 1
    return _read() + (_by_s if _reads[0] > _after else 0)


time.time = _jumping
