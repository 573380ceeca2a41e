"""Tensors laid end to end and copied back."""

import torch

from paceline.parallel.ddp import copy_parts, flatten_tensors, split_into_buckets


def test_buckets_hold_neighbours_of_one_type():
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.zeros(1).double(), torch.zeros(9)]
    assert [[t.numel() for t in bucket] for bucket in split_into_buckets(tensors, 32)] == [[4, 4], [4], [1], [9]]
    assert list(split_into_buckets([])) == []


def test_parts_come_back_from_a_longer_row():
    tensors = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(5)]
    row = torch.cat([flatten_tensors(tensors), torch.full((4,), 7.0)])
    copies = [torch.empty_like(t) for t in tensors]
    copy_parts(row, copies)
    assert all(map(torch.equal, copies, tensors))
