"""Site files: what they may say, how they are found, and that nothing of theirs reaches a shell unquoted."""

import subprocess
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.slurm.site_file import SiteFile, read_site


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "paceline" / "sites"
    folder.mkdir(parents=True)
    return folder


def test_find_site(sites, tmp_path):
    assert read_site() == SiteFile()
    (sites / "default.yaml").write_text("partition: gpu\nruns: ../../runs\n")
    (sites / "lab.yaml").write_text("partition: long\n")
    assert read_site().partition == "gpu"
    assert read_site().runs.resolve() == tmp_path / "runs"
    assert read_site("lab").partition == read_site(sites / "lab.yaml").partition == "long"
    with pytest.raises(UserError, match="did you mean 'lab'"):
        read_site("lap")


@pytest.mark.parametrize("recipe", sorted((Path(__file__).parents[3] / "recipes" / "sites").glob("*.yaml")))
def test_recipes_and_page_of_sites(recipe):
    site = read_site(recipe)
    page = (Path(__file__).parents[3] / "docs" / "submit.md").read_text()
    assert site.partition
    assert all(f"`{key}" in page for key in SiteFile.model_fields)


def test_nothing_of_a_site_reaches_the_shell_unquoted(tmp_path):
    evil = "it's `touch MARK` $(touch MARK) \"; touch MARK"
    site = SiteFile(
        variables={"WORDS": evil}, scratch=f"{tmp_path}/{evil}/{{job}}", setup=("echo set up",), python="python3"
    )
    lines = site.lines(tmp_path)
    script = "\n".join([*lines, 'printf "%s\\n" "$WORDS" "$TMPDIR"'])
    environ = {"SLURM_JOB_ID": "12", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.splitlines() == ["set up", evil, f"{tmp_path}/{evil}/12"]
    assert not list(tmp_path.rglob("MARK"))
    assert site.interpreter == ("python3",)
    assert SiteFile(container="apptainer exec --nv 'my image.sif'").interpreter == (
        *("apptainer", "exec", "--nv", "my image.sif", "python"),
    )


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert SiteFile(python="~/env/bin/python").interpreter == ("/home/me/env/bin/python",)
    assert SiteFile(container="apptainer exec ~/image.sif").interpreter[2] == "/home/me/image.sif"
    assert "scratch=/home/me/scratch" in SiteFile(scratch="~/scratch").lines(tmp_path)


def test_clock_in_a_site_file(tmp_path):
    """YAML 1.1 reads 24:00:00 as 86400, which Slurm would take for 60 days."""
    file = tmp_path / "site.yaml"
    file.write_text("time_limit: 24:00:00\noptions: {begin: 16:00}\npartition: trueskill\n")
    site = read_site(file)
    assert (site.hours, site.options, site.partition) == (24, {"begin": "16:00"}, "trueskill")


def test_scratch_that_cannot_be_written():
    lines = SiteFile(scratch="/proc/nowhere").lines("/")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "paceline: the scratch folder /proc/nowhere cannot be written on " in done.stderr
