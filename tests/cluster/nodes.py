"""Machines as network namespaces of this one: a name and an address each, and a switch to cut links of. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CARD, SWITCH = "eth0", "switch"
SUBNET = "10.214.88"
PORT = 29_541


def why_not() -> str | None:
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return None


class Nodes:
    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder = count, folder
        self.prefix = f"pl{os.getpid()}"
        self.started: list[subprocess.Popen[str]] = []

    def name(self, node: int) -> str:
        return f"node{node}"

    def address(self, node: int) -> str:
        return f"{SUBNET}.{node + 1}"

    def _space(self, node: int) -> str:
        return f"{self.prefix}-{node}"

    def _port(self, node: int) -> str:
        """The switch's end of a node's link."""
        return f"port{node}"

    def up(self) -> None:
        switch = f"{self.prefix}-{SWITCH}"
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", SWITCH, "type", "bridge")
        _do("ip", "-n", switch, "link", "set", SWITCH, "up")
        hosts = ["127.0.0.1 localhost"]
        for node in range(self.count):
            space = self._space(node)
            _do("ip", "netns", "add", space)
            _do("ip", "-n", space, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", self._port(node), "netns", switch)
            _do("ip", "-n", space, "link", "add", CARD, *pair)
            _do("ip", "-n", space, "address", "add", f"{self.address(node)}/24", "dev", CARD)
            _do("ip", "-n", space, "link", "set", CARD, "up")
            _do("ip", "-n", switch, "link", "set", self._port(node), "master", SWITCH, "up")
            hosts.append(f"{self.address(node)} {self.name(node)}")
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def down(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for space in (f"{self.prefix}-{SWITCH}", *map(self._space, range(self.count))):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)

    def cut(self, node: int) -> None:
        """Its port of the switch takes nothing any more. The node itself sees silence, as of a dead switch."""
        _do("ip", "-n", f"{self.prefix}-{SWITCH}", "link", "set", self._port(node), "nomaster")

    def start(self, node: int, command: list[str], environ: dict[str, str], before: str = "") -> subprocess.Popen[str]:
        """Run a command on a node. `before` is done there first, in a mount namespace of its own."""
        inside = f"hostname {self.name(node)} && mount --bind {self.folder / 'hosts'} /etc/hosts && {before or 'true'}"
        words = ["ip", "netns", "exec", self._space(node), "unshare", "--uts", "--mount", "sh", "-c"]
        words += [f'{inside} && exec "$@"', "sh", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(words, env={**os.environ, **environ}, **pipes)
        self.started.append(process)
        return process

    def start_ranks(
        self, command: list[str], each: int = 1, before: dict[int, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """The same command as every rank, so many of them on each node, with the variables that torchrun sets."""
        ranks = []
        for rank in range(self.count * each):
            node, local = divmod(rank, each)
            place = {"RANK": rank, "WORLD_SIZE": self.count * each, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each}
            place |= {"MASTER_ADDR": self.name(0), "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
            environ = {name: str(value) for name, value in place.items()}
            ranks.append(self.start(node, command, environ, (before or {}).get(node, "")))
        return ranks


@contextmanager
def nodes(count: int, folder: Path) -> Iterator[Nodes]:
    found = Nodes(count, folder)
    try:
        found.up()
        yield found
    finally:
        found.down()


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
