"""What `plan --emit` writes comes back through `adopt` as the layout that was planned."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

import paceline
from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.planner.emit import build_launch_files
from paceline.planner.plan import plan

LM = """name: lm
workload: lm
model: {{preset: 1b}}
data: {{sequence: 1024, vocab: 32000}}
train: {{steps: 1000, global_batch: {batch}, precision: bf16, clip: 0.5}}
"""


@settings(max_examples=14)
@given(
    kind=st.sampled_from(["torchrun", "slurm", "accelerate", "deepspeed"]),
    where=st.sampled_from(["4xA100", "2x8xA100", "8xH100", "2x2xA40", "1xH200"]),
    batch=st.sampled_from([32, 64, 256]),
    words=st.lists(
        st.sampled_from(["parallel.strategy=zero2", "parallel.activation_checkpointing=full", "train.lr=3e-4"]),
        unique=True,
    ),
)
def test_emitted_files_are_adopted(tmp_path_factory, kind, where, batch, words):
    folder = tmp_path_factory.mktemp("it's emitted")
    run_file = folder / "run file.yaml"
    run_file.write_text(LM.format(batch=batch))
    whole = [*words, "parallel.tensor=1", "parallel.pipeline=1"]
    found = plan(paceline.load(run_file, whole), where)
    try:
        files = build_launch_files(found, run_file, kind, whole)
    except UserError:
        assume(False)  # nothing fits, or the engine cannot do what was chosen
    for name, text in files.items():
        (folder / name).write_text(text)
    adopted = paceline.adopt([folder / name for name in files], out=folder / "adopted.yaml")
    spec = paceline.load(folder / "adopted.yaml")
    assert layout_of(spec) == found.chosen.price.layout
    assert (spec.name, spec.workload) == ("lm", "lm")
    assert spec.train == paceline.load(run_file, words).train
    assert spec.parallel.engine == (kind if kind in ("accelerate", "deepspeed") else "torch")
    assert not [row for row in adopted.rows if row.review]
