"""The pages on Keras: both programs run, and what the page shows is in them."""

import difflib
import re
import runpy
from pathlib import Path

import paceline
from paceline.nn.keras_backend import import_keras

keras = import_keras()
DOCS = Path(__file__).resolve().parents[4] / "docs"
EXAMPLES = DOCS / "examples" / "moving"
PAGE = (DOCS / "moving" / "keras.md").read_text(encoding="utf-8")
MOST_LINES = 8


def test_before_and_after_learn_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "keras_before.py"), run_name="__main__")
    before = float(re.findall(r"val_accuracy: (\S+)", capsys.readouterr().out)[-1])
    result = paceline.train(paceline.load(EXAMPLES / "keras_after.yaml", ["parallel.threads=1"]), tmp_path, show=False)
    assert keras.saving.load_model("digits.keras").count_params() == result.summary.parameters
    assert min(before, result.metrics["accuracy"]) > 0.9


def test_few_lines_are_added_and_the_page_shows_them():
    before, after = (_lines(EXAMPLES / f"keras_{word}.py") for word in ("before", "after"))
    run_file = [line for line in _lines(EXAMPLES / "keras_after.yaml") if not line.startswith("#")]
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(added) + len(run_file) <= MOST_LINES
    assert "\n".join(run_file) in PAGE
    gone = "\n".join(before[before.index('if __name__ == "__main__":') :])
    assert f"```python\n{gone}\n```" in PAGE
    for line in re.findall(r"^(?:def|    (?!\.\.\.)).*$", PAGE, re.MULTILINE):
        assert line in before


def _lines(file):
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
