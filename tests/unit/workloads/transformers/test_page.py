"""The run files on docs/transformers.md train."""

import re
from pathlib import Path

import pytest
import yaml

from paceline import train
from paceline.config import build_spec

PAGE = Path(__file__).parents[4] / "docs" / "transformers.md"
RUN_FILES = [
    yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("values", RUN_FILES, ids=[values["name"] for values in RUN_FILES])
def test_run_files_on_the_page_train(values, hf, corpus_cache, tmp_path):
    values["model"]["init_from"] = str(hf / Path(values["model"]["init_from"]).name)
    values["data"] |= {"path": str(hf / values["data"]["path"]), "cache": str(corpus_cache)}
    values["train"]["lr"] = float(values["train"]["lr"])
    result = train(build_spec({**values, "parallel": {"threads": 1}}), tmp_path, show=False)
    assert result.summary.loss_last < result.summary.loss_first
