"""What a failed command is shown to have said."""

import pytest

from paceline.measurement.scripts.measure_command import explain_missing_device, extract_error_lines, quote_output

OUTPUT = """[rank1]: Traceback (most recent call last):
[rank1]: ValueError: sample 17 is empty
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2374
paceline: rank 1 ended with exit code 1
"""


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path):
    file = tmp_path / "output.txt"
    file.write_text(OUTPUT)
    assert extract_error_lines(file)[-1] == "[rank1]: ValueError: sample 17 is empty"
    file.write_text("\n".join(OUTPUT.splitlines()[2:]))
    assert extract_error_lines(file)[-1].startswith("[rank0]: RuntimeError")
    file.write_text("python: can't open file 'trian.py'\npaceline: rank 0 ended with exit code 2\n")
    assert extract_error_lines(file) == ["python: can't open file 'trian.py'"]
    file.write_text("")
    assert extract_error_lines(file) == ["it printed nothing"]


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("RuntimeError: Distributed package doesn't have NCCL built in", True),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", True),
        ("RuntimeError: CUDA error: invalid device ordinal", True),
        ("AssertionError: Torch not compiled with CUDA enabled", True),
        ("RuntimeError: Found no NVIDIA driver on your system.", True),
        ("ValueError: sample 17 is empty", False),
    ],
)
def test_a_script_that_wants_a_device_is_told_how_to_try_it_without(line, missing):
    told = explain_missing_device(["Traceback (most recent call last):", line])
    assert bool(told) == missing
    assert not missing or "init_process_group('gloo')" in told


def test_the_last_line_and_the_log_are_named(tmp_path):
    (tmp_path / "output.txt").write_text("starting\nUsage: train.py --data FOLDER\n")
    assert quote_output(tmp_path) == f"its last line: Usage: train.py --data FOLDER; see {tmp_path / 'output.txt'}"
