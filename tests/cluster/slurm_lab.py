"""A real Slurm of several nodes on one machine, for tests: no systemd, nothing outside of one folder.

Each node is a `slurmd` in a UTS and mount namespace of its own, so that it has a hostname and all names resolve. GPUs
are symbolic links to /dev/null. It needs root and the packages slurmctld, slurmd, slurm-client and munge.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")
PORTS = 12_000 + os.getpid() % 700 * 10
"""Of the daemons: others than those of another lab on this machine."""
HELD_S = 5
CONFIGURATION = """ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/ctld
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
MinJobAge=3600
SlurmdTimeout=10
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=10
PartitionName=short Nodes=ALL MaxTime=30 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
NODE = "NodeName=n{i} NodeAddr=127.0.0.{address} Port={port} CPUs=4 RealMemory=16000 Gres=gpu:a100:2 State=UNKNOWN"
IN_NAMESPACE = 'mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs "$2" && hostname "$3" && shift 3 && exec "$@"'


def missing() -> str:
    if os.geteuid() != 0:
        return "namespaces need root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def until(what: str, true: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.1)


class Lab:
    """A cluster; its nodes are n1, n2, …"""

    def __init__(self, root: Path, nodes: int = 2) -> None:
        self.root, self.nodes = root, [f"n{i + 1}" for i in range(nodes)]
        self._held_since: dict[str, float] = {}
        self.shared = root / "shared"
        """A small disk that all nodes see."""
        self.local = root / "local"
        """Another one on each node, which the others do not see."""
        self.environ = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}

    def start(self) -> None:
        self._configure()
        munged = ("munged", "--key-file=munge.key", "--socket=munge.socket", "--pid-file=munged.pid")
        inside = [word.replace("=", f"={self.root}/", 1) if "=" in word else word for word in munged]
        self._run(*inside, f"--log-file={self.root}/munged.log", f"--seed-file={self.root}/seed")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.until_ready()

    def _configure(self) -> None:
        for name in ("ctld", "dev", "shared", "local", *self.nodes):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        # before the nodes have namespaces of their own, which would not see it
        self._run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(self.shared))
        self.root.chmod(0o755)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for i in range(2):
            (self.root / "dev" / f"nvidia{i}").symlink_to("/dev/null")
        lines = [NODE.format(i=i, address=10 + i, port=PORTS + i) for i in range(1, len(self.nodes) + 1)]
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            port=PORTS,
            root=self.root,
            nodes="\n".join(lines),
            first_job=random.SystemRandom().randrange(1000, 60_000_000),  # ports of jobs follow from their ids
        )
        (self.root / "slurm.conf").write_text(text)
        (self.root / "gres.conf").write_text(f"Name=gpu Type=a100 File={self.root}/dev/nvidia[0-1]\n")
        known = [f"127.0.0.{11 + i} {node}" for i, node in enumerate(self.nodes)]
        hosts = ["127.0.0.1 localhost", f"127.0.0.1 {socket.gethostname()}", *known]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")

    def start_controller(self) -> None:
        self._run("slurmctld", "-i", "-f", str(self.root / "slurm.conf"))

    def kill_controller(self) -> None:
        os.kill(int((self.root / "slurmctld.pid").read_text()), signal.SIGKILL)

    def start_node(self, node: str) -> None:
        slurmd = ("slurmd", "-N", node, "-f", str(self.root / "slurm.conf"))
        namespace = ("unshare", "--uts", "--mount", "--", "sh", "-c", IN_NAMESPACE, "_")
        self._run(*namespace, str(self.root / "hosts"), str(self.local), node, *slurmd)

    def until_ready(self, states: str = "idle") -> None:
        listed = ("sinfo", "-h", "-N", "-p", "debug", "-t", states, "-o", "%N")
        until("all nodes are up", lambda: len(set(self.ask(*listed).split())) == len(self.nodes))

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        return done.stdout

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "--states=all", "-j", job, "-o", "%T").strip()

    def hurry(self, job: str) -> None:
        """A job that was requeued is held for two minutes. Here a few seconds are enough for its credential to go."""
        if self.ask("squeue", "-h", "-j", job, "-o", "%r").strip() != "BeginTime":
            self._held_since.pop(job, None)
        elif time.monotonic() - self._held_since.setdefault(job, time.monotonic()) > HELD_S:
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def kill_slurmd(self, node: str) -> None:
        """The daemon alone: the processes of its jobs go on."""
        os.kill(int((self.root / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)

    def crash(self, node: str) -> None:
        """The daemon and everything that its jobs have started on the node, at once."""
        self.kill_slurmd(node)
        for process in list(self._processes_of(node)):
            _kill(process)

    def ranks(self, node: str) -> list[int]:
        """The processes of a node that train; srun, on the first, has their words in its own."""
        found = []
        for process in self._processes_of(node):
            program, *words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if b"train" in words and program != b"srun":
                found.append(process)
        return found

    def _processes_of(self, node: str) -> Iterator[int]:
        """Tasks of jobs on a node, and the slurmstepd above them, whose own environment does not say it."""
        own = f"SLURM_CONF={self.root / 'slurm.conf'}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                above = Path(f"/proc/{parent}/comm").read_text().strip()
            except (OSError, IndexError, ValueError):
                continue
            if f"SLURMD_NODENAME={node}".encode() in variables and own in variables:
                yield int(folder.name)
                if above == "slurmstepd":
                    yield parent

    def stop(self) -> None:
        self.ask("scancel", "--state=RUNNING", "--full", "-u", "root")
        self.ask("scancel", "-u", "root")
        for node in self.nodes:
            for process in set(self._processes_of(node)):
                _kill(process)
        for file in self.root.glob("*.pid"):
            _kill(int(file.read_text() or 0))
        subprocess.run(["umount", "--lazy", str(self.shared)], check=False)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _kill(process: int) -> None:
    if process > 1:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
