"""What a job asks for, with reasons; what is refused before anything is sent; what can be asked without Slurm."""

import json
import os
import re
import subprocess
import sys

import pytest

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.runlog.events import read_events
from paceline.runlog.jobs import record_job_event
from paceline.runlog.run_dir import RunDir
from paceline.slurm.commands import Partition
from paceline.slurm.request import build_job_request
from paceline.slurm.site_file import SiteFile
from paceline.slurm.submit import strip_launcher, submit
from results import expect_error

HERE = {
    "gpu": Partition("gpu", 24.0, 8, 500_000, 4, "a100", 64),
    "cpu": Partition("cpu", None, 4, 64_000, 0, ""),
}
LM = {
    "name": "lm",
    "workload": "lm",
    "model": {"preset": "1b"},
    "data": {"sequence": 1024, "vocab": 32000},
    "train": {"steps": 20_000, "global_batch": 64, "precision": "bf16"},
}


@pytest.fixture(scope="module")
def lm():
    return build_spec(LM)


def asked(spec, site=None, anyway=False, **words):
    return build_job_request(spec, site or SiteFile(partition="gpu"), words, HERE, anyway=anyway)


def test_the_plan_fills_in_what_nobody_asked_for(lm):
    made = asked(lm, nodes="2", gpus_per_node=4)
    assert (made.nodes, made.per_node, made.gpus, made.ranks) == ("2", 4, "a100:4", 8)
    assert made.spec.parallel.ranks == 8
    assert made.spec.parallel.strategy == made.plan.chosen.price.layout.strategy != "auto"
    assert made.hours == pytest.approx(min(24, made.plan.chosen.hours * 1.3))
    assert made.options == {"partition": "gpu", "cpus-per-task": "16", "mem": "500000M"}
    assert any("USD: 8 × " in reason for reason in made.reasons)
    assert asked(lm, nodes="1", gpus_per_node=1).options["mem"] == "125000M"
    chosen = build_job_request(lm, SiteFile(partition="gpu", cluster="2x4xA100"), {}, HERE)
    assert int(chosen.nodes) * chosen.per_node == chosen.plan.chosen.devices
    who = [made.reasons[0], chosen.reasons[0], asked(lm, SiteFile(partition="cpu"), time="1h").reasons[0]]
    told = ["2 nodes × 4 ranks: asked for", "what the plan chooses", "1 node × 1 rank: of the run or the site"]
    assert all(word in reason for word, reason in zip(told, who, strict=True))


def test_more_ranks_than_pay_are_warned_of(lm):
    little = lm.replace({"model.preset": "gpt2", "train.global_batch": 8})
    slow = SiteFile(partition="gpu", cluster="8x4xA100@0.1GB/s")
    (warning,) = (reason for reason in asked(little, slow, nodes="2", gpus_per_node=4).reasons if "warning" in reason)
    assert re.match(r"warning: 1 rank would take [\d.]+ (min|h|d).* in place of ", warning)
    assert not any("warning" in reason for reason in asked(lm, nodes="2", gpus_per_node=4).reasons)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["torchrun", "--nproc-per-node", "4", "train.py", "--lr", "1"], ("py", "train.py", "--lr", "1")),
        (["torchrun", "--nnodes=2", "-m", "mine.train"], ("py", "-m", "mine.train")),
        (["python", "-m", "torch.distributed.run", "--standalone", "a.py"], ("py", "a.py")),
        (["./train.sh", "x"], ("./train.sh", "x")),
    ],
)
def test_a_command_loses_its_launcher(command, words):
    assert strip_launcher(command, ("py",)) == words


def test_command_runs_on_each_rank_and_requeues(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    words = "submit --dry-run --time 1h --nodes 2 --ranks-per-node 2 --json"
    told = ask(f"{words} --checkpoints 'out/**/*.pt' --out {tmp_path} -- torchrun train.py 'a b'")
    assert told.code == 0
    script = json.loads(told.out)["script"]
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in script
    programs = {
        "srun": f"shift; for SLURM_PROCID in 0 1; do export SLURM_PROCID; {sys.executable} -c"
        ' \'import os, pathlib; pathlib.Path("out").mkdir(exist_ok=True)\'; "$@"; done',
        "scontrol": 'echo "$@" >> asked',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").write_text(
        "import os, sys, time\ntime.sleep(0.02)\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "open('out/step.pt', 'w').close()\nsys.exit(3)\n"
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n1"}
    env = {**os.environ, **job, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert (ran.returncode, ran.stdout.splitlines()) == (3, ["0 4 ['a b']", "1 4 ['a b']"])
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"


@pytest.mark.parametrize(
    ("option", "ranks", "gpus"), [("", 2, 2), ("--gpus-per-node 1", 1, 1), ("--ranks-per-node 3", 3, None)]
)
def test_command_takes_gpus_of_the_site(tmp_path, ask, option, ranks, gpus):
    (tmp_path / "two.yaml").write_text("gpus_per_node: 2\n")
    told = ask(f"submit --dry-run --time 1h --json --site {tmp_path / 'two.yaml'} {option} -- torchrun train.py")
    script = json.loads(told.out)["script"]
    found = [re.search(rf"#SBATCH --{name}-per-node=(\d+)\n", script) for name in ("ntasks", "gpus")]
    assert [int(number[1]) if number else None for number in found] == [ranks, gpus]


def test_run_beyond_the_time_limit(lm):
    made = asked(lm, SiteFile(partition="gpu", time_limit="2h"), nodes=1, gpus_per_node=4)
    jobs = -(-made.plan.chosen.hours * 1.3 // 2)
    assert made.hours == 2
    assert f"2 h 00 min for a job: the limit here, in about {jobs:.0f} jobs, one after the other" in made.reasons


def test_memory_of_a_job_on_cores(small):
    made = asked(small, SiteFile(partition="cpu", cpus_per_rank=2), nodes="2")
    assert (made.gpus, made.ranks, made.options["cpus-per-task"]) == ("", 2, "2")
    assert 2000 < int(made.options["mem"].removesuffix("M")) < 10_000
    narrow = {"cpu": Partition("cpu", None, 4, 1_500, 0, "")}
    made = build_job_request(small, SiteFile(partition="cpu"), {"nodes": 1, "time": "1h"}, narrow)
    assert made.options["mem"] == "1500M"
    assert made.reasons[-1].startswith("1.5 GB of memory per node: all that a node has; 2.")


def test_gpus_of_a_site(lm):
    made = asked(lm, SiteFile(partition="gpu", gpus_per_node=4, gpu_type="a100"))
    assert (made.nodes, made.gpus) == ("1", "a100:4")
    assert made.reasons[0].startswith("1 node × 4 ranks: of the run or the site")
    cores = asked(lm, time="1h", anyway=True)
    assert cores.gpus == ""
    assert "no GPU: none is asked for; nodes of gpu have 4 (--gpus-per-node)" in cores.reasons


def test_fewer_nodes_must_hold_the_layout(small):
    made = asked(small, SiteFile(partition="cpu", fewer_nodes=True), nodes="2")
    assert made.nodes == "1-2"
    assert asked(small, nodes="1-2", ranks_per_node=2).nodes == "1-2"
    with pytest.raises(UserError, match="is not a multiple of"):
        asked(small.replace({"parallel.strategy": "ddp", "parallel.tensor": 2}), nodes="1-2", anyway=True)


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        ({"partition": "gpus"}, "unknown-name", "--partition"),
        ({"nodes": 1, "gpus_per_node": 8}, "unavailable", "--gpus-per-node"),
        ({"nodes": "0"}, "invalid-value", "--nodes"),
        ({"nodes": "3-2"}, "invalid-value", "--nodes"),
        ({"nodes": 9, "gpus_per_node": 4}, "unavailable", "--nodes"),
        ({"nodes": 1, "gpus_per_node": 4, "time": "48h"}, "does-not-fit", "--time"),
        ({"nodes": 1, "gpus_per_node": 4, "time": "1m"}, "does-not-fit", "--time"),
        ({"nodes": 1, "gpus_per_node": 2, "ranks_per_node": 4}, "conflict", "--ranks-per-node"),
        ({"nodes": 1, "gpus_per_node": 4, "memory": "lots"}, "invalid-value", "--memory"),
    ],
)
def test_what_cannot_work_is_rejected(lm, words, code, key):
    with expect_error(code, key) as error:
        asked(lm, **words)
    assert "\n" not in str(error.value)
    with expect_error("unknown-name", "partition in the site file", match="gpus: there is no such partition"):
        asked(lm, SiteFile(partition="gpus"))


def test_plan_that_does_not_fit_needs_anyway(lm):
    large = lm.replace({"model.preset": "7b", "parallel.strategy": "ddp", "parallel.activation_checkpointing": "none"})
    with expect_error("does-not-fit", match="--anyway"):
        asked(large, nodes=1, gpus_per_node=1)
    sent = asked(large, nodes=1, gpus_per_node=1, anyway=True, time="1h")
    assert (sent.plan, sent.hours, sent.spec.parallel.strategy) == (None, 1.0, "ddp")


def test_script_without_a_run_is_rejected(tmp_path):
    script = tmp_path / "train.py"
    spec = build_spec({"workload": str(script), "train": {"epochs": 1}, "parallel": {"ranks": 2}})
    site = SiteFile(partition="gpu", gpus_per_node=2, gpu_type="new")
    script.write_text("for batch in batches:\n    optimizer.step()\n")
    with expect_error("invalid-workload", "run.batches"):
        build_job_request(spec, site, {"time": "1h"}, {})
    sent = build_job_request(spec, site, {"time": "1h"}, {}, anyway=True)
    assert (sent.plan, sent.ranks) == (None, 2)
    for text in ("import paceline\nrun.step(loss)\n", "from mine import main\nmain()\n"):
        script.write_text(text)
        assert build_job_request(spec, site, {"time": "1h"}, {}).ranks == 2


def test_dry_run_writes_nothing(small, tmp_path, monkeypatch):
    folder = tmp_path / 'it\'s "a" $HOME folder'
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = submit(small, nodes=1, time="10m", dry_run=True, site=SiteFile(options={"comment": 'say "hi"'}))
    subprocess.run(["bash", "-n"], input=found.script, text=True, check=True)
    assert f'#SBATCH --output="{folder}/runs/small/slurm-%j.out"'.replace('"a"', '\\"a\\"') in found.script
    assert '#SBATCH --comment="say \\"hi\\""' in found.script
    assert "#SBATCH --time=0-00:10:00\n" in found.script
    assert not list(folder.iterdir())


def test_fewer_nodes_request_no_tasks(small, tmp_path, monkeypatch):
    """It would keep their number from the first start, and wait for nodes that are gone."""
    monkeypatch.chdir(tmp_path)
    site = SiteFile(cpus_per_rank=3)
    script = submit(small, nodes="1-4", ranks_per_node=2, time="10m", dry_run=True, site=site).script
    assert "#SBATCH --nodes=1-4\n#SBATCH --mincpus=6\n" in script
    assert "srun --kill-on-bad-exit=1 --ntasks-per-node=2 --cpus-per-task=3 " in script
    assert 'parallel.ranks="$((SLURM_JOB_NUM_NODES * 2))" --resume-or-start &' in script
    assert "SBATCH --ntasks" not in script
    with pytest.raises(UserError, match="cpus-per-task"):
        submit(small, nodes="1-2", time="10m", dry_run=True, site=SiteFile(options={"cpus-per-task": "many"}))


def test_submit_from_python_checks_options(small):
    with expect_error("unknown-key", "tme", match="did you mean 'time'"):
        submit(small, nodes=1, tme="10m", dry_run=True)
    script = submit(small, nodes=1, time="10m", memory=4000, dry_run=True).script
    assert "#SBATCH --time=0-00:10:00\n" in script
    assert "#SBATCH --mem=4000\n" in script


def test_a_run_that_is_finished_says_how_it_goes_on(small, tmp_path):
    run = RunDir.claim(tmp_path, "small", small)
    run.summary_file.write_text(json.dumps({"status": "finished"}))
    with expect_error("conflict", match="--resume"):
        submit(run.path, dry_run=True)


def test_resumed_run_keeps_its_machines(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    run = RunDir.claim(tmp_path, "small", small.replace({"parallel.ranks": 2}))
    record_job_event(run, "submit", job="7", nodes="2", per_node=1, gpus="")
    same = submit(run.path, time="10m", dry_run=True).script
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in same
    other = submit(run.path, nodes=3, time="10m", dry_run=True).script
    assert f"paceline train {run.path} parallel.strategy=ddp parallel.ranks=3 " in other


def test_a_sweep_of_measure_is_an_array(tmp_path, monkeypatch, ask):
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "run.yaml").write_text("name: line\n")
    words = "submit run.yaml train.lr=3e-4 --measure --ranks 1,2,4 --time 1h --dry-run"
    told = ask(words)
    assert told.code == 0
    assert "#SBATCH --array=0-1\n" in told.out
    assert "#SBATCH --cpus-per-task=4\n" in told.out
    shown, env = told.out.replace("exec ", "printf '%s\\n' "), {"SLURM_ARRAY_TASK_ID": "1"}
    said = subprocess.run(["bash"], input=shown, text=True, capture_output=True, check=True, env=env)
    *_, file, override, _, ranks, _, out = said.stdout.splitlines()
    assert (file, override, ranks) == (str(folder / "run.yaml"), "train.lr=3e-4", "1,4")
    assert out == str(folder / "runs" / "line-measure" / "ranks-4")
    for more, why in (("--nodes=2", "--nodes: each task"), ("--memory=lots", "not an amount of memory")):
        told = ask(f"{words} {more}")
        assert (told.code, why in told.err) == (2, True)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


@pytest.fixture
def sent(small, tmp_path, monkeypatch):
    """A run that has had two jobs, on a machine without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunDir.claim(tmp_path / "runs", "small", small)
    for job, text in (("7", "first\n"), ("8", "second \x1b[2J\n")):
        log = run.path / f"slurm-{job}.out"
        log.write_text(text)
        record_job_event(run, "submit", job=job, log=str(log))
    return run


def test_dry_run_as_json(sent, ask):
    (sent.path.parent / "run.yaml").write_text("name: line\n")
    told = json.loads(ask("submit runs/run.yaml --nodes 2 --time 10m --dry-run --json").out)
    assert (told["run"], told["file"], told["job"]) == ("runs/line", "runs/line/job.sbatch", "")
    assert told["reasons"][0].startswith("2 nodes × 1 rank: asked for")
    subprocess.run(["/bin/bash", "-n"], input=told["script"], text=True, check=True)


def test_logs_of_all_jobs_or_of_one(sent, ask):
    told = json.loads(ask("logs runs/small --json").out)
    assert [(each["job"], each["text"]) for each in told] == [("7", "first\n"), ("8", "second \x1b[2J\n")]
    assert told[0]["log"] == str(sent.path / "slurm-7.out")
    assert [each["job"] for each in json.loads(ask("logs 8 --json").out)] == ["8"]
    shown = ask("logs runs/small").out
    assert "── job 7\nfirst\n── job 8\nsecond " in shown
    assert "\x1b" not in shown
    refused = ask("logs 8 --json -f")
    assert (refused.code, "--follow" in refused.err) == (2, True)


def test_silent_queue_is_an_error(sent, tmp_path, ask):
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm_load_jobs error: Unable to contact >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    for words in ("cancel runs/small", "logs 8 -f"):
        told = ask(words)
        assert told.code == 2
        assert "Slurm does not answer here (slurm_load_jobs error: Unable to contact); type this on" in told.err
    assert [event["kind"] for event in read_events(sent.jobs_file)] == ["submit", "submit"]


@pytest.mark.parametrize("words", ["cancel runs/small --json", "submit run.yaml --nodes 2"])
def test_without_slurm(words, sent, tmp_path, ask):
    (tmp_path / "run.yaml").write_text("name: line\n")
    told = ask(words)
    assert (told.code, "there is no Slurm here (sbatch is not found)" in told.err) == (2, True)
    assert [event["kind"] for event in read_events(sent.jobs_file)] == ["submit", "submit"]
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["small"]
