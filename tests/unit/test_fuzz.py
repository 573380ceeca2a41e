"""A few damaged files of every kind: each is read, or refused in one line. tests/soak/test_fuzz.py tries thousands."""

import pytest

import fuzzing

FOUND = {
    "SummaryFile": (241, 417, 783, 897, 1075, 1189),
    "CalibrationFile": (285, 384),
    "Manifest": (95,),
    "Npy": (66, 81),
    "DeepSpeed": (895,),
    "CheckpointMetadata": (1005,),
    "KeptTokenizer": (461, 751),
    "MeasurementFile": (239,),
}
"""Mutations that a reader once answered otherwise."""
FEW = 12


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_a_damaged_file_is_read_or_refused(name, tmp_path):
    numbers = [*range(FEW), *FOUND.get(name, ())]
    assert list(fuzzing.tried(name, numbers, tmp_path)) == numbers
