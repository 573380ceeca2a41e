"""What the tests share: a small corpus made once, and a run file on it."""

import atexit
import heapq
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from nursery import Nursery
from results import Answer

# The tests decide what programs see of the terminal, the launcher and the repository around them.
FOREIGN = (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONIOENCODING", "PYTHONDONTWRITEBYTECODE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WANDB_MODE"),
)
FOREIGN_FAMILIES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_", "ACCELERATE_", "GIT_", "PACELINE_")
for name in [n for n in os.environ if n in FOREIGN or n.startswith(FOREIGN_FAMILIES)]:
    del os.environ[name]
os.environ["OMP_NUM_THREADS"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ or "XDG_STATE_HOME" not in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="paceline-state-")  # not the state of who runs the tests
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

for number in (signal.SIGINT, signal.SIGHUP):  # `command &` and nohup ignore them, and so would all that starts here
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

settings.register_profile("the same examples every time", derandomize=True, deadline=None, database=None)
settings.load_profile("the same examples every time")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=120_000)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def slow_network():
    """Nodes as network namespaces, as the benchmarks make them."""
    import slow_network

    if reason := slow_network.why_not():
        pytest.skip(f"no slow network here: {reason}")
    return slow_network


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def warm_ranks(nursery):
    """Ranks come from a process that has imported torch already: for tests of what they do, not of their launch."""
    from paceline.launch import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "subprocess", SimpleNamespace(Popen=nursery.start, DEVNULL=subprocess.DEVNULL))
        yield


@pytest.fixture(scope="session")
def small(corpus_cache):
    """A small classifier on real text: 203 texts, which no batch and no number of ranks divides."""
    from paceline.config import build_spec

    return build_spec(
        {
            "name": "small",
            "model": {"width": 32, "heads": 4, "layers": 2, "ffn": 64},
            "data": {"source": "docstrings", "max_length": 64, "vocab": 1024, "limit": 203, "cache": str(corpus_cache)},
            "train": {"steps": 12, "global_batch": 24, "lr": 3e-3, "log_every": 1},
            "parallel": {"threads": 1},
        }
    )


@pytest.fixture(scope="session")
def tiny_lm(corpus_cache, tmp_path_factory):
    """A tiny language model on modules of Python; its last batch of an epoch is a smaller one."""
    from paceline.config import build_spec

    shape = {"width": 32, "heads": 4, "kv_heads": 2, "layers": 4, "ffn": 64}
    pages = tmp_path_factory.mktemp("pages")
    for module in (textwrap, heapq, shlex):
        (pages / Path(module.__file__).name).write_bytes(Path(module.__file__).read_bytes())
    return build_spec(
        {
            "name": "tiny",
            "workload": "lm",
            "model": {"preset": "custom", **shape, "tied": False},
            "data": {"source": "text", "path": str(pages), "sequence": 32, "vocab": 300, "cache": str(corpus_cache)},
            "train": {"steps": 20, "global_batch": 16, "lr": 3e-3, "warmup": 0.5, "log_every": 1},
            "parallel": {"threads": 1, "timeout_s": 120},
        }
    )


@pytest.fixture
def ask(capsys):
    """Run a command in this process, as words or as a line."""
    from paceline.cli.main import main

    def ask(*words) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(shlex.split(words[0]) if len(words) == 1 and isinstance(words[0], str) else [str(w) for w in words])
        return Answer(left.value.code, *capsys.readouterr(), left.value.__context__)

    return ask


@pytest.fixture
def in_time():
    def stop(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
