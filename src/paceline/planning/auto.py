"""`parallel: auto` on a named cluster: the layout that the plan chooses. On this machine, auto stays what it is."""

from __future__ import annotations

from paceline.errors import UserError
from paceline.planning.plan import plan
from paceline.spec import DEFAULT, RunSpec


def applied(spec: RunSpec, ranks: int | None) -> RunSpec:
    """The spec with the chosen layout written out; `ranks` is how many a launcher has started, if one has."""
    if spec.cluster == "local" or spec.parallel.strategy != "auto":
        return spec
    asked = ranks
    if asked is None and spec.origin("parallel.ranks") != DEFAULT:
        asked = spec.parallel.ranks
    found = plan(spec, devices=(asked,) if asked else ())
    chosen = found.overrides()
    nodes = found.chosen.price.where.cluster.nodes if found.chosen else 1
    if ranks is None and nodes > 1:
        raise UserError(
            f"cluster: {spec.cluster}: the plan takes {chosen['parallel.ranks']} devices on {nodes} nodes, and this "
            "command starts ranks on one; make launch files with  paceline plan RUN.yaml --emit slurm  or  torchrun"
        )
    return spec.replace(chosen)
