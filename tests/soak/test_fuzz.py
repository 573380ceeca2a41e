"""2,000 damaged files for each reader: read or refused, each within 2 s of computing and 1 GB of memory."""

import os
import resource
import time
from contextlib import contextmanager

import pytest

from fuzzing_records import TARGETS, tried

MUTATIONS = int(os.environ.get("FUZZ_MUTATIONS", "2000"))
MOST_S = 2.0
MOST_BYTES = 1 << 30


@contextmanager
def little_memory():
    """1 GB more than there is now: what wants more gets a MemoryError, which no reader may let through."""
    import psutil

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", TARGETS)
def test_every_damaged_file_is_read_or_refused(name, tmp_path):
    assert list(tried(name, range(1), tmp_path)) == [0]  # what it imports, and what that reserves, does not count
    began = time.process_time()
    with little_memory():
        for number in tried(name, range(1, MUTATIONS), tmp_path):
            took, began = time.process_time() - began, time.process_time()
            assert took < MOST_S, f"{name}, mutation {number}: {took:.1f} s"
