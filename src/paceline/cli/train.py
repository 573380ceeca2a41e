"""The commands `train`, `explain` and `launch`."""

import logging
from argparse import Namespace
from pathlib import Path

from paceline.cli.arguments import load_spec
from paceline.config.registry import USER_CODE_LOGGER
from paceline.errors import UserError
from paceline.io.terminal import build_console, warn


def run_train(args: Namespace) -> int:
    from paceline.api import train
    from paceline.io.files import print_json, to_flat
    from paceline.trainer.run import build_follow_up_spec, build_resumed_spec

    words, resume, start = args.words, args.resume, args.start
    if args.quiet:
        logging.getLogger(USER_CODE_LOGGER).setLevel(logging.WARNING)
    if resume and start:
        raise UserError("--resume continues a run and --from starts another; give one of them", code="conflict")
    if args.resume_or_start and not resume and words and Path(words[0], "spec.yaml").is_file():
        resume, words = Path(words[0]), words[1:]
    if (resume or start) and (not words or "=" in words[0]):
        spec = build_resumed_spec(resume, words) if resume else build_follow_up_spec(start, words)
    else:
        spec = load_spec([*words, f"model.init_from={start}"] if start else words, "train")
    result = train(
        spec,
        args.out,
        resume=resume,
        show=not (args.quiet or args.json),
        resume_or_start=args.resume_or_start,
        changed_code=args.changed_code,
    )
    if args.json and not result.launched:
        print_json({"path": result.path, **to_flat(result.summary)})
    return 0 if result.status in ("finished", "stopped") else 1


def run_explain(args: Namespace) -> int:
    from paceline.io.files import print_json
    from paceline.runlog.run_dir import find_recorded_spec
    from paceline.trainer import explain

    recorded = None if args.data else find_recorded_spec(args.words)
    spec = recorded or load_spec(args.words, "explain")
    if args.data:
        from paceline.data.samples import count_samples
        from paceline.trainer.failures import translate_failures
        from paceline.workload import build_workload

        with translate_failures(spec):
            workload = build_workload(spec)
            workload.prepare(warn)
            samples = count_samples(workload)
            derived = explain.derive_facts(spec, workload, samples)
    else:
        derived = explain.derive_facts(spec)
    if args.json:
        print_json({"values": explain.list_values(spec), "derived": derived})
        return 0
    console = build_console()
    table = explain.build_value_table(spec, args.all)
    console.print(table)
    console.print("", *derived, sep="\n")
    if left := sum(1 for _ in spec.fields()) - len(table.rows):
        console.print(f"{left} more keys have their defaults; print them with  --all")
    return 0


def run_launch(args: Namespace) -> int:
    from paceline.launch.command import launch_command

    own = ["--", *args.command] if args.before and args.command else args.command
    return launch_command([*args.before, *own], args.ranks, args.restarts, args.json)
