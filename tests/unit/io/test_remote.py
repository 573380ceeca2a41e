"""Data and run folders at addresses; a folder of this machine under the name local:// stands for a bucket."""

import shutil

import pytest

import paceline
from paceline import train
from paceline.errors import RunFailed, UserError
from paceline.io.remote import fetch_data, fetch_run, find_address, find_mirror, upload_run
from results import expect_error

ROWS = "x,y\n" + "".join(f"{i % 13},{'no' if i % 13 < 6 else 'yes'}\n" for i in range(200))


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "t.csv").write_text(ROWS)
    return f"local://{tmp_path}/bucket"


def test_addresses():
    assert find_address("s3://box/a") == find_address("s3:/box/a") == "s3://box/a"
    assert find_address("local:/tmp/a") == "local:///tmp/a"
    assert [find_address(path) for path in ("/tmp/s3", "a.py:Class", "C:/a", "s3:")] == [None] * 4


def test_data_are_cached_by_content(bucket, tmp_path):
    first = fetch_data(f"{bucket}/t.csv")
    assert first.read_text() == ROWS
    assert fetch_data(f"{bucket}/t.csv") == first
    (tmp_path / "bucket" / "t.csv").write_text(ROWS + "1,no\n")
    assert fetch_data(f"{bucket}/t.csv") != first
    assert [file.name for file in fetch_data(bucket).iterdir()] == ["t.csv"]
    for address, code in ((f"{bucket}/none.csv", "not-found"), ("nowhere://a/b", "not-installed")):
        with expect_error(code, "data.path"):
            fetch_data(address, "data.path")


def test_a_run_lives_at_its_address(bucket, tmp_path):
    """Trained there, lost here while a checkpoint was being sent, resumed, and used from there."""
    values = {"name": "net", "workload": "tabular", "data": {"path": f"{bucket}/t.csv", "label": "y"}}
    values["train"] = {"steps": 6, "checkpoint_every": 2, "global_batch": 16}
    run = train(values, f"{bucket}/runs", show=False)
    there = tmp_path / "bucket" / "runs" / "net"
    assert run.path == find_mirror(f"{bucket}/runs") / "net"
    sealed = sorted(file.parent.name for file in there.glob("checkpoints/*/manifest.json"))
    assert sealed == ["step-00000004", "step-00000006"]
    newest = there / "checkpoints" / "step-00000006"
    (newest / "manifest.json").unlink()  # it is sent last
    (there / "summary.json").unlink()
    shutil.rmtree(tmp_path / "cache")
    assert paceline.open(f"{bucket}/runs/net").step == 4
    again = train(values, f"{bucket}/runs", resume_or_start=True, show=False)
    assert again.summary.trained.steps == 6
    assert again.summary.loss_last == pytest.approx(run.summary.loss_last, rel=1e-6)
    assert (newest / "manifest.json").is_file()
    shutil.rmtree(tmp_path / "cache")
    assert train(values, f"{bucket}/runs", show=False).path.name == "net-2"
    shutil.rmtree(there.parent)
    there.parent.write_text("refuses")
    with expect_error("not-writable", kind=RunFailed):
        upload_run(run.path.parent / "net-2")
    with pytest.raises(UserError):
        fetch_run(f"{bucket}/runs/none")
