"""A model that is never whole in the memory of a rank: loaded, trained, saved and exported in parts."""

import subprocess
import sys

import pytest
import torch

import hf_models
import paceline
from paceline.config import build_spec

SIDES = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 24}
RANKS = 4
EXPORT = """
import resource, sys, paceline
from paceline.inference import export
export.SHARD_BYTES = 60_000_000
for run, out in zip(sys.argv[1::2], sys.argv[2::2]):
    paceline.export(run, out)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus_cache):
    """The same run of a tiny model and of one of 200 MB, its frozen weights divided over four ranks."""
    folder, found = tmp_path_factory.mktemp("large"), {}
    (folder / "texts.txt").write_text("\n".join(hf_models.TEXTS))
    data = {"source": "text", "path": str(folder / "texts.txt"), "documents": "lines", "sequence": 16}
    data |= {"cache": str(corpus_cache)}
    parallel = {"strategy": "fsdp", "ranks": RANKS, "threads": 1, "timeout_s": 120}
    for name, sides in (("tiny", {}), ("large", SIDES)):
        model = {"init_from": str(hf_models.save("llama", folder / name, **sides)), "lora_rank": 1}
        values = {"workload": "transformers", "model": model, "data": data, "parallel": parallel}
        spec = build_spec({**values, "train": {"steps": 2, "global_batch": 4, "optimizer": "sgd", "lr": 0.1}})
        found[name] = paceline.train(spec, folder / "runs" / name, show=False)
    return found


def test_a_rank_loads_trains_and_saves_its_part_alone(runs):
    whole = sum(tensor.nbytes for tensor in runs["large"].weights().values())
    peaks = zip(*(runs[name].summary.peak_bytes_per_rank for name in ("tiny", "large")), strict=True)
    grown = [large - tiny for tiny, large in peaks]
    assert len(grown) == RANKS
    assert whole > 210e6
    assert max(grown) < 0.8 * whole  # a quarter, its copy for the checkpoint, two gathered layers


def test_an_export_writes_shards_and_holds_one_tensor_at_a_time(runs, tmp_path):
    import transformers

    whole = sum(tensor.nbytes for tensor in runs["large"].weights().values())
    places = [str(part) for name in ("tiny", "large") for part in (runs[name].path, tmp_path / name)]
    done = subprocess.run([sys.executable, "-c", EXPORT, *places], capture_output=True, text=True, check=True)
    tiny, large = map(int, done.stdout.split())
    assert large - tiny < 0.2 * whole
    assert (tmp_path / "tiny" / "model.safetensors").exists()
    shards = sorted(tmp_path.glob("large/model-*.safetensors"))
    assert [file.name for file in shards] == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert max(file.stat().st_size for file in shards) < 61e6
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large").eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = paceline.open(runs["large"].path).model(ids).logits
        assert (read(ids).logits - wanted).abs().max() < 1e-5
