"""A few damaged files of every kind: each is read, or refused in one line. tests/soak/test_fuzz.py tries thousands."""

import os
from contextlib import suppress

import pytest

from fuzzing_records import TARGETS, tried
from paceline.errors import PacelineError

FOUND = {
    "SummaryFile": (241, 417, 783, 897, 1075, 1189),
    "CalibrationFile": (285, 384),
    "Manifest": (95,),
    "Npy": (66, 81),
    "Npz": (1111,),
    "DeepSpeed": (895,),
    "CheckpointMetadata": (1005,),
    "KeptTokenizer": (461, 751),
    "MeasurementFile": (239, 380),
    "SweepFile": (5, 9, 19),
    "WeightsIndex": (25, 281),
    "KeptImages": (7, 61),
    "EnsembleFile": (43,),
    "CorpusMeta": (61,),
    "StreamMeta": (13,),
    "KeptTrees": (3, 39, 85),
    "KeptLightgbm": (497, 1748),
    "HuggingFaceConfig": (19, 33, 75, 177),
}
"""Mutations that a reader once answered otherwise."""
FEW = 12


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_read_or_refused(name, tmp_path):
    numbers = [*range(FEW), *FOUND.get(name, ())]
    assert list(tried(name, numbers, tmp_path)) == numbers


@pytest.mark.parametrize("name", TARGETS)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name, tmp_path, in_time):
    whole = TARGETS[name]
    whole.make(tmp_path)
    (tmp_path / whole.file).unlink()
    os.mkfifo(tmp_path / whole.file)
    with suppress(PacelineError, OSError):  # one line too, at the edge of a command
        whole.read(tmp_path)
