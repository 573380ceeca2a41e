"""How gradients are put into buckets."""

import torch

from paceline.horovod.optimizer import BUCKET_BYTES, group_into_buckets


def parameters(*sizes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size in sizes]


def numbers(every, groups=0):
    places = {id(parameter): place for place, parameter in enumerate(every)}
    return [[places[id(parameter)] for parameter in bucket] for bucket in group_into_buckets(every, groups)]


def test_buckets_go_backwards_and_hold_so_many_bytes():
    large = BUCKET_BYTES // 4
    assert numbers(parameters(5, 5, 5)) == [[2, 1, 0]]
    assert numbers(parameters(5, large, 5, 5)) == [[3, 2], [1], [0]]
    assert numbers([]) == []


def test_a_bucket_has_one_type():
    half = parameters(5, dtype=torch.float16)
    assert numbers(parameters(5, 5) + half + parameters(5)) == [[3], [2], [1, 0]]


def test_groups_are_those_that_were_asked_for():
    every = parameters(5, 5, 5, 5, 5)
    assert numbers(every, 2) == [[4, 3, 2], [1, 0]]
    assert numbers(every, 9) == [[4], [3], [2], [1], [0]]
    assert numbers(every, [[every[0], every[4]], [every[2]]]) == [[4, 0], [2], [3, 1]]
