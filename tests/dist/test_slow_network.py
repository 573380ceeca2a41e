"""On a slow link plain data parallelism is slower than one rank, and sending less makes the second rank pay."""

import os

import pytest

STEPS = 16
RATE = "100mbit"


@pytest.mark.timing
def test_a_second_rank_pays_where_less_is_sent(slow_network, corpus_cache, tmp_path):
    busy = os.getloadavg()[0]
    if busy > len(os.sched_getaffinity(0)) + 1:
        pytest.skip(f"the machine is busy (load {busy:.1f}): times would say nothing")

    def run(ranks, steps, **parallel):
        spec = slow_network.spec_of(None, steps, ranks=ranks, **parallel).replace({"data.cache": str(corpus_cache)})
        return slow_network.train_on(link, ranks, spec, tmp_path)

    with slow_network.slow_link() as link:
        link.shape(RATE)
        one = run(1, STEPS)
        less = run(2, STEPS, reduce="powersgd")
        plain = run(2, 2)
    assert one["parameters"] == pytest.approx(10e6, rel=0.01)
    assert plain["rate"] < 0.5 * one["rate"]
    assert less["rate"] > 1.3 * one["rate"]
    assert less["loss"] == pytest.approx(one["loss"], rel=0.01)
