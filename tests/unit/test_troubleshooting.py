"""The page of common failures quotes messages of the code: those that can be produced here are."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from paceline.config import load
from paceline.data.order import Order
from paceline.diagnostics import network_checks, system_checks
from paceline.diagnostics.results import CheckContext
from paceline.errors import PacelineError
from paceline.launch.environment import RankInfo
from paceline.launch.root_cause import describe_exit
from paceline.layout import layout_of
from paceline.measurement.diagnosis import CAUSES, IN_TURN, Cause
from paceline.trainer.explain import list_equations
from paceline.trainer.run import fit_to_launcher

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
QUOTES = [
    (number, line)
    for number, text in SECTIONS.items()
    for block in re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def test_every_section_quotes_a_message():
    assert list(SECTIONS) == [str(number) for number in range(1, 23)]
    assert {number for number, _ in QUOTES} == set(SECTIONS)


@pytest.mark.parametrize("number", SECTIONS)
def test_each_says_how_it_was_tried(number):
    assert re.search(r"\]\(\.\./tests/|[Nn]ot tried here|is not\.", SECTIONS[number])


def quoted(number):
    return [line for section, line in QUOTES if section == str(number)]


def said(findings):
    return [f"{finding.verdict}: {finding.check}: {finding.found}" for finding in findings]


def test_signals_that_end_ranks():
    assert str(describe_exit(1, -signal.SIGBUS, time.time(), secondary=False).error) in quoted(1)
    assert str(describe_exit(0, -signal.SIGKILL, time.time(), secondary=False).error) in quoted(15)


def test_an_interface_and_a_port():
    assert said(network_checks.check_interface(CheckContext(environ={"GLOO_SOCKET_IFNAME": "ib7"})))[0] in quoted(2)
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        (found,) = said(network_checks.check_port(CheckContext(environ={"MASTER_PORT": port})))
    assert found.replace(port, "29500") in quoted(3)


def test_another_number_of_ranks(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: news\nparallel: {ranks: 4}\n")
    with pytest.raises(PacelineError) as refused:
        fit_to_launcher(load(file), RankInfo(0, 2, 0, 1, "srun", "n1", 29500))
    assert str(refused.value) in quoted(8)


def test_the_last_batch_is_smaller(small):
    assert quoted(11)[0] in list_equations(small, layout_of(small), Order.of(small.train, 203))


def test_causes_of_slow_steps():
    sentences = [*quoted(21), *quoted(22)]
    for cause in (Cause.INPUT, Cause.SLOW_RANK, IN_TURN):
        (words,) = re.findall(r"[a-z][a-z ,]{9,}", re.sub(r"\{.*?\}", "|", CAUSES[cause]))[:1]
        assert any(words in sentence for sentence in sentences), words


def test_the_odd_version():
    nodes = {"n1": {"tokenizers": "0.23.3"}, "n3": {"tokenizers": "0.23.3"}, "n2": {"tokenizers": "0.0.1"}}
    assert said(system_checks.compare_versions(nodes)) == quoted(19)
