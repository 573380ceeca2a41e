"""Committed states as files: everything is read back as it was, and what cannot be written is rejected before."""

import numpy as np
import pytest
import torch

from paceline.errors import UserError
from paceline.horovod import elastic


def test_a_state_comes_back_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--name", "two words"])
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tied = torch.ones(2, 2, dtype=torch.bfloat16)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "best": float("inf"),
        "note": None,
        "both": [tied, tied.t()],
        "mixed": {1: ("a", True), "b": [1.5, {}], "list": ["tensor", "0"]},
        "array": np.arange(3),
        "scalar": np.int64(7),
    }
    file = tmp_path / "state.safetensors"
    elastic.write_commit(file, state)
    back, origin = elastic.read_commit(file)
    assert origin.startswith(str(file))
    assert origin.endswith("train.py --name 'two words'")
    for plain in ("epoch", "best", "note", "mixed", "scalar"):
        assert back[plain] == state[plain]
        assert type(back[plain]) is type(state[plain])
    assert isinstance(back["array"], np.ndarray)
    assert back["array"].tolist() == [0, 1, 2]
    assert torch.equal(back["both"][1], tied.t())
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(back["optimizer"])
    for saved, loaded in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    model.load_state_dict(back["model"])


@pytest.mark.parametrize(
    ("value", "kind"), [({2}, "set"), (np.array(["a"]), "ndarray"), (np.datetime64(1, "D"), "datetime64")]
)
def test_what_cannot_be_written_is_rejected_before_the_work_begins(value, kind):
    with pytest.raises(UserError, match=f"is a {kind}") as error:
        elastic.check_commit({"log": {"x": [1, value]}})
    assert error.value.key == "state.log['x'][1]"


@pytest.mark.parametrize("content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"no safetensors at all"])
def test_another_file_is_not_taken_for_a_state(tmp_path, content):
    file = tmp_path / "elastic-train.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        elastic.read_commit(file)
    assert (error.value.code, error.value.key) == ("damaged", str(file))
