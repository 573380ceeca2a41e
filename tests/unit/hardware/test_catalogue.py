"""The catalogue and the short forms of clusters."""

import csv
from pathlib import Path

import pytest
import yaml

from paceline.errors import UserError
from paceline.hardware import catalogue as hardware
from paceline.hardware.catalogue import GB, find_device, load_catalogue, parse_cluster
from results import expect_error

CASES = yaml.safe_load(Path(__file__).with_name("spellings.yaml").read_text(encoding="utf-8"))


def test_every_row_has_its_facts_a_source_and_a_date():
    for name, d in load_catalogue().items():
        assert d.memory_bytes > 1e9 < d.bandwidth_bytes_s / 10, name
        assert min(d.flops_s["fp32"], d.link_bytes_s, d.per_node) > 0, name
        assert d.source, name
        assert d.date.count("-") == 2, name
        assert d.usd_per_hour is None or d.usd_per_hour > 0, name


@pytest.mark.parametrize(("text", "name"), CASES["devices"])
def test_devices_are_found_by_part_of_their_name_as_people_spell_it(text, name):
    assert find_device(text).name == name


@pytest.mark.parametrize(("text", "nodes", "per_node", "link_gbs", "node_gbps"), CASES["short forms"])
def test_short_forms(text, nodes, per_node, link_gbs, node_gbps):
    c = parse_cluster(text)
    assert (c.nodes, c.per_node, c.devices) == (nodes, per_node, nodes * per_node)
    assert c.link_bytes_s == pytest.approx(link_gbs * GB)
    assert c.node_bytes_s == pytest.approx(node_gbps * GB / 8)


def test_a_device_without_a_rate_runs_at_the_next_one():
    v100 = find_device("V100")
    assert v100.peak_flops_s("bf16") == v100.peak_flops_s("fp16") == 125e12
    assert v100.peak_flops_s("tf32") == 15.7e12
    assert find_device("A100").peak_flops_s("fp8") == 312e12
    with pytest.raises(UserError, match="no rate for 'int4'"):
        v100.peak_flops_s("int4")


def test_resizing_keeps_whole_nodes():
    c = parse_cluster("4x8xA100")
    assert [(c.resized(n).nodes, c.resized(n).per_node) for n in (4, 64)] == [(1, 4), (8, 8)]
    with pytest.raises(UserError, match="try 8 or 16"):
        c.resized(12)


def test_spot_prices_say_where_they_come_from_and_are_lower():
    with Path(hardware.__file__).with_name("hardware.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert bool(row["spot_usd_per_hour"]) == bool(row["spot_from"])
            if row["spot_usd_per_hour"] and row["usd_per_hour"]:
                assert float(row["spot_usd_per_hour"]) < float(row["usd_per_hour"])
    assert find_device("H100").spot_usd_per_hour < parse_cluster("8xH100").usd_per_device_hour


@pytest.fixture
def read(tmp_path):
    """Read a cluster file with this content."""

    def read(text):
        (tmp_path / "lab.yaml").write_text(text)
        return parse_cluster(str(tmp_path / "lab.yaml"))

    return read


def test_cluster_files(read):
    c = read("device: A100-40GB\nnodes: 2\nper_node: 4\nlink: pcie\nnetwork: 25Gb\nprice: 1.5\nmemory_gb: 39\n")
    assert (c.devices, c.usd_per_device_hour) == (8, 1.5)
    assert c.device.memory_bytes == 39e9
    assert "lab.yaml" in c.device.source
    assert c.node_bytes_s == 25e9 / 8
    assert c.host_bytes is None
    assert c.spot_usd_per_device_hour is None  # that of other people
    assert read("device: A100-40GB\nper_node: 4\nhost_memory_gb: 512\n").resized(2).host_bytes == 512e9
    assert read("device: H100\nprice: 2\nspot_price: 0.5\n").spot_usd_per_device_hour == 0.5


def test_devices_may_come_from_the_users_own_catalogue(read, tmp_path):
    head, row, *_ = Path(hardware.__file__).with_name("hardware.csv").read_text().splitlines()
    (tmp_path / "mine.csv").write_text(f"{head},host_gb\n{row.replace('V100-SXM2-16GB', 'Mine-16GB')},384\n")
    found = read("device: Mine-16GB\nper_node: 2\ncatalogue: mine.csv\n")
    assert (found.device.name, found.host_bytes) == ("Mine-16GB", 384e9)
    injected = row.replace("V100-SXM2-16GB", '"Mine\nrm -rf home"')
    for text in (f"{head}\n{injected}\n", "name,memory\nMine,much\n"):
        load_catalogue.cache_clear()
        (tmp_path / "mine.csv").write_text(text)
        with expect_error("invalid-format", "catalogue"):
            read("device: Mine\ncatalogue: mine.csv\n")
