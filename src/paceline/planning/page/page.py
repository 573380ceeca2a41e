"""The page: its data, its script and its style in one file that asks no network."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from paceline.planning.candidates import MEMORY_BAND
from paceline.planning.page.grid import Ask, grid
from paceline.planning.plan import Plan
from paceline.record.browser import page_data, policy, template

ASSETS = Path(__file__).parent / "assets"


def page(plan: Plan, ask: Ask, command: list[str]) -> str:
    """`command` are the words that made the plan, from which the page makes those of each setting."""
    from markupsafe import Markup

    data: dict[str, Any] = {**grid(plan, ask), "command": shlex.join(command), "memory_error": MEMORY_BAND}
    whole = plan.site.whole
    script = (ASSETS / "plan.js").read_text(encoding="utf-8")
    return template((ASSETS / "plan.html.j2").read_text(encoding="utf-8")).render(
        plan=plan,
        where=f"{plan.site.name} = {f'{whole.nodes} × ' * (whole.nodes > 1)}{whole.per_node} × {whole.device.name}",
        source=whole.device,
        assumptions=plan.subject.assumptions,
        insisted=plan.limits.words(),
        data=Markup(page_data(data)),
        script=Markup(script),
        policy=policy(script),
        style=Markup((ASSETS / "plan.css").read_text(encoding="utf-8")),
    )
