"""The command `mcp`: coding assistants plan, check and measure by the Model Context Protocol.

Each tool is a verb in a process of its own, since standard output belongs to the protocol.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from paceline.errors import UserError

ABOUT = "Distributed training: what fits, what it costs, whether more devices pay, and whether the answer is the same."


def plan(run_file: str, cluster: str = "", overrides: Sequence[str] = ()) -> Any:
    """Predict memory, time, speed-up and cost of a run file on a cluster, such as 2x8xH100; nothing is trained."""
    return run_verb("plan", run_file, *overrides, *(["--cluster", cluster] if cluster else []))


def explain(run_file: str, overrides: Sequence[str] = ()) -> Any:
    """List the values of a run file, with units and where each came from."""
    return run_verb("explain", run_file, *overrides)


def check(run_file: str, layouts: str = "single,ddp:2", steps: int = 10) -> Any:
    """Train a few steps under several layouts, and compare losses, gradient norms and weights."""
    return run_verb("check", run_file, "--layouts", layouts, "--steps", str(steps))


def measure(run_file: str, ranks: str = "1,2", steps: int = 30) -> Any:
    """Measure a run file on several numbers of ranks: speed-up, efficiency, and what holds it back."""
    return run_verb("measure", run_file, "--ranks", ranks, "--steps", str(steps))


def report(folders: Sequence[str], out: str = "report") -> Any:
    """Write a page, figures and tables of run folders or measurements."""
    return run_verb("report", *folders, "--out", out)


def runs(folder: str = "runs") -> Any:
    """List the runs of a folder: status, score, last loss, time."""
    return run_verb("runs", folder)


def run_verb(verb: str, *words: str) -> Any:
    """Run a verb with `--json` and return what it prints; raise ToolError with its message if it fails."""
    from mcp.server.mcpserver.exceptions import ToolError

    command = [sys.executable, "-m", "paceline", verb, *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ToolError(done.stderr.strip() or f"paceline {verb} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def run_mcp(args: Namespace) -> int:
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise UserError("the package mcp is not installed;  pip install 'mcp>=2.0'", code="not-installed") from None
    server = MCPServer("paceline", instructions=ABOUT)
    for tool in (plan, explain, check, measure, report, runs):
        server.add_tool(tool)
    server.run("stdio")
    return 0
