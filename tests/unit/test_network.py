"""Paceline opens no connection of its own: nothing is downloaded, nothing is reported home."""

import sys

ASKED = []
RUN = """
name: r
model: {width: 32, heads: 4, layers: 1, ffn: 32}
data: {source: csv, path: t.csv, vocab: 300, cache: cache}
train: {steps: 2, global_batch: 4}
parallel: {threads: 1}
"""
VERBS = ["explain run.yaml", "plan run.yaml", "train run.yaml --quiet", "watch runs/r --once", "predict runs/r words"]
listening = [False]


def note(event, arguments):
    if listening[0] and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        ASKED.append((event, *arguments[1:]))


def test_a_run_from_plan_to_report_asks_no_network(tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"some words {i},{i % 2}\n" for i in range(40)))
    sys.addaudithook(note)  # for as long as the process lives, and of use while this test does
    listening[0] = True
    try:
        for words in [*VERBS, "export runs/r --out weights.safetensors", "report runs/r --out report"]:
            answer = ask(words)
            assert answer.code == 0, answer.err
    finally:
        listening[0] = False
    assert ASKED == []
