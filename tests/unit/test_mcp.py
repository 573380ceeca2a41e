"""The server for coding assistants, through a client that starts it as they do."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

mcp = pytest.importorskip("mcp", reason="needs the package mcp")
REPOSITORY = Path(__file__).resolve().parents[2]


async def _ask() -> tuple[set[str], list]:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    command = StdioServerParameters(command=sys.executable, args=["-m", "paceline", "mcp"])
    async with Client(stdio_client(command)) as client:
        listed = await client.list_tools()
        recipe = str(REPOSITORY / "recipes" / "lm_7b.yaml")
        requests = [
            ("plan", {"run_file": recipe, "cluster": "1x8xH100"}),
            ("explain", {"run_file": recipe, "overrides": ["train.lr=1e-4"]}),
            ("plan", {"run_file": "missing.yaml"}),
        ]
        return {tool.name for tool in listed.tools}, [await client.call_tool(*request) for request in requests]


def test_an_assistant_plans_and_explains_a_run():
    names, (plan, explained, wrong) = asyncio.run(_ask())
    assert names == {"plan", "explain", "check", "measure", "report", "runs"}
    rows = json.loads(plan.content[0].text)["rows"]
    assert any(row["fits"] for row in rows)
    values = {row["key"]: row for row in json.loads(explained.content[0].text)["values"]}
    assert values["train.lr"]["value"] == 1e-4
    assert wrong.is_error
    assert "missing.yaml" in wrong.content[0].text
