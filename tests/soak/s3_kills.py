"""Kill a run while it sends checkpoints to an S3 server, lose its machine each time, and resume: nothing sent is lost.

By hand: pip install 'moto[server]' s3fs, then  python tests/soak/s3_kills.py [KILLS]
"""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import s3fs
from moto.server import ThreadedMotoServer

PORT = 5077
RUN = """
name: net
workload: tabular
data: {path: s3://box/t.csv, label: y}
train: {steps: 600, global_batch: 16, checkpoint_every: 5, evaluate_every: 100000, schedule: constant, warmup: 0}
parallel: {threads: 1}
"""
ROWS = "x,y\n" + "".join(f"{i % 13},{'no' if i % 13 < 6 else 'yes'}\n" for i in range(400))


def find_newest(files: s3fs.S3FileSystem) -> int:
    """Return the step of the newest checkpoint that was sent whole."""
    files.invalidate_cache()
    sealed = [name.split("/")[-2] for name in files.find("box/runs") if name.endswith("/manifest.json")]
    return max((int(name.removeprefix("step-")) for name in sealed if name.startswith("step-")), default=0)


def main(kills: int) -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=PORT)
    server.start()
    folder = Path(tempfile.mkdtemp())
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
    }
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "XDG_CACHE_HOME": str(folder / "cache")}
    files = s3fs.S3FileSystem()
    files.mkdir("box")
    files.pipe_file("box/t.csv", ROWS.encode())
    (folder / "run.yaml").write_text(RUN)
    command = [sys.executable, "-m", "paceline", "train", str(folder / "run.yaml"), "--out", "s3://box/runs"]
    before = 0
    for kill in range(1, kills + 1):
        log = (folder / "log.txt").open("w")
        process = subprocess.Popen([*command, "--resume-or-start"], start_new_session=True, stdout=log, stderr=log)
        while find_newest(files) <= before:  # until it has sent one more
            if process.poll() is not None:
                sys.exit((folder / "log.txt").read_text())
            time.sleep(0.02)
        time.sleep(random.random())
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        names = [name.split("/") for name in files.find("box/runs/net/checkpoints")]
        half = {name[-2] for name in names} - {name[-2] for name in names if name[-1] == "manifest.json"}
        found = find_newest(files)
        assert found >= before, f"kill {kill}: step {before} was sent, and step {found} is left"
        print(f"kill {kill}: resumes at step {found}; half there: {', '.join(half) or 'none'}", flush=True)
        before = found
        shutil.rmtree(folder / "cache" / "paceline" / "runs")  # the machine is gone
    found = []
    for out in ("s3://box/runs", str(folder / "plain")):  # killed all along, and never
        given = [*command[:-1], out, "--resume-or-start", "--json"]
        ended = subprocess.run(given, stdout=subprocess.PIPE, text=True, check=True)
        summary = json.loads(ended.stdout)
        found.append((summary["steps"], summary["loss_last"], summary["metrics"]))
    print(f"killed {kills} times, and never: steps, loss and metrics are {found[0]}")
    assert found[0] == found[1], found[1]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
