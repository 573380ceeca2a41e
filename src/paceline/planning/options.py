"""The options of the verb `plan`, apart from what they do: they are read at every start."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline import registry


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    parser.add_argument("--cluster", metavar="2x8xH100|FILE.yaml", help="devices and links; without it the run file's")
    parser.add_argument("--devices", default="", metavar="1,2,4", help="numbers of devices to try")
    parser.add_argument("--deadline", metavar="24h", help="recommend the cheapest that is done by then")
    parser.add_argument("--budget", type=float, metavar="USD", help="recommend only what costs at most this much")
    parser.add_argument("--min-efficiency", type=float, metavar="0.5", help="recommend only what wastes no more")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour, instead of the catalogue's")
    parser.add_argument("--spot-price", type=float, metavar="USD", help="the same of devices that may be taken away")
    parser.add_argument("--spot", action="store_true", help="count with that price: cost, budget and the page")
    parser.add_argument("--samples", type=int, metavar="N", help="training samples, where the data are not here")
    parser.add_argument("--tokens", type=float, metavar="N", help="mean length of a text, where the data are not here")
    parser.add_argument(
        "--what-if",
        metavar="WORDS",
        help="price what training does not do: pure-bf16, 8bit-states, context=N, with commas between them",
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE.json", help="measured by  paceline calibrate")
    parser.add_argument("--page", type=Path, metavar="plan.html", help="write a page with sliders that opens offline")
    parser.add_argument("--json", action="store_true", help="print every term as JSON instead of tables")
    kinds = ("torchrun", "slurm", "kubernetes", "skypilot", "accelerate", "deepspeed")
    parser.add_argument("--emit", choices=kinds, help="launch files")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write plan.json and the launch files there")
    for option, (_, what) in registry.plan_options().items():
        parser.add_argument(option, dest=what.key, metavar=what.metavar, help=what.help)
