"""The doctor on two nodes: network namespaces with names, files and limits of their own, and faults in one of them."""

import json
import os
import subprocess
import sys

import pytest

ENTER = """#!/bin/sh
# enter NODE COMMAND …: a shell of a node, which has its own name; the second has faults
node=$1; shift
exec ip netns exec "$node" unshare --uts sh -ec '
    hostname "$0"
    case "$0" in *-1)
        mount --bind {fake} {site}
        mount -t tmpfs -o size=1m tmpfs {out}
        ulimit -Sn 512
    esac
    exec "$@"' "$node" "$@"
"""


@pytest.fixture(scope="module")
def nodes(slow_network, tmp_path_factory):
    """Names that resolve in each other's namespace, joined by a link of 100 Mbit/s."""
    from pathlib import Path

    with slow_network.slow_link() as link:
        link.shape("100mbit")
        folders = [Path("/etc/netns", name) for name in link.names]
        lines = [f"{address} {name}" for address, name in zip(slow_network.ADDRESSES, link.names, strict=True)]
        try:
            for folder in folders:
                folder.mkdir(parents=True)
                (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            yield link.names
        finally:
            for folder in folders:
                (folder / "hosts").unlink(missing_ok=True)
                folder.rmdir()


@pytest.fixture(scope="module")
def found(nodes, tmp_path_factory):
    """(exit code, what was found, by check) of one examination with four faults."""
    scratch = tmp_path_factory.mktemp("doctor")
    fake, site, out = (scratch / name for name in ("fake", "site", "out"))
    other = fake / "tokenizers-0.0.1.dist-info"
    for folder in (other, site, out):
        folder.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenizers\nVersion: 0.0.1\n")
    enter = scratch / "enter"
    enter.write_text(ENTER.format(fake=fake, site=site, out=out))
    enter.chmod(0o755)
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    words = ["doctor", "--nodes", ",".join(nodes), "--by", str(enter), "--out", str(out), "--json"]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-m", "paceline", *words], env=environ, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told["hosts"] == list(nodes)
    return done.returncode, [finding for finding in told["findings"] if finding["verdict"] != "ok"]


def test_each_fault_is_found_on_its_node_and_nothing_else_is_blamed(found, nodes):
    code, findings = found
    wrong = [finding for finding in findings if finding["verdict"] == "wrong"]
    by_check = {finding["check"]: finding for finding in wrong}
    assert code == 1
    assert by_check.keys() == {"link", "tokenizers everywhere", "room", "disk speed", "open files"}
    for check in ("tokenizers everywhere", "room", "disk speed", "open files"):
        assert by_check[check]["host"] == nodes[1]
    assert by_check["tokenizers everywhere"]["found"] == f"0.0.1 on {nodes[1]}"
    assert "No space left on device" in by_check["disk speed"]["found"]
    assert by_check["open files"]["found"] == "512"
    assert by_check["open files"]["remedy"].startswith("ulimit -n ")
    links = [finding["found"] for finding in wrong if finding["check"] == "link"]
    both = {f"{nodes[0]} to {nodes[1]}", f"{nodes[1]} to {nodes[0]}"}
    assert {link.rpartition(": ")[0] for link in links} == both
    assert all(float(link.removesuffix(" Mbit/s").split()[-1]) < 110 for link in links)
    (folder,) = [finding for finding in findings if finding["check"] == "shared folder"]
    assert (folder["verdict"], f"not seen by {nodes[1]}" in folder["found"]) == ("look", True)
