"""What a failed command is shown to have said."""

from paceline.measurement.scripts.measure_command import extract_error_lines

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
