"""Files of a model that somebody else made: nothing that they name is imported, executed or fetched."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.errors import UserError
from paceline.io.files import hash_file, write_sealed
from paceline.runlog.run_dir import KEPT_SUMS
from results import expect_error

PLANTED = "raise SystemExit('executed')\n"
BAD_CONFIGS = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))["configs"]
listening, seen = [False], []


def note(event, arguments):
    """An audit hook, of use while a test listens: connections, processes, and code of planted files."""
    if not listening[0] or (event == "subprocess.Popen" and arguments[0] in ("git", sys.executable)):
        return  # Paceline asks for the commit, and tokenises apart
    if event.startswith(("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec")):
        seen.append((event, str(arguments)[:80]))
    elif event in ("import", "exec") and "planted" in str(arguments[0]):
        seen.append((event, str(arguments[0])[:80]))


@pytest.fixture(scope="module")
def hook():
    sys.addaudithook(note)  # for as long as the process lives


@pytest.fixture
def watched(hook):
    seen.clear()
    listening[0] = True
    yield seen
    listening[0] = False


@pytest.fixture
def folder(hf, tmp_path):
    return Path(shutil.copytree(hf / "llama", tmp_path / "model"))


def edit(file, values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(("values", "code", "key"), BAD_CONFIGS)
def test_a_config_that_names_code_is_rejected_by_train_and_plan(values, code, key, folder, run_file, tmp_path, watched):
    edit(folder / "config.json", values)
    spec = run_file("llama", **{"model.init_from": str(folder)})
    for ask in (lambda: paceline.train(spec, tmp_path / "runs", show=False), lambda: paceline.plan(spec)):
        if code == "invalid-data" and ask.__code__.co_names[1] == "plan":
            continue  # a plan by formula never builds the library's config
        with expect_error(code, key):
            ask()
    assert not list(tmp_path.glob("runs/*"))
    assert watched == []


@pytest.mark.parametrize(("values", "code", "key"), BAD_CONFIGS[:3])
def test_so_is_one_that_a_run_kept(values, code, key, run_file, tmp_path, watched, ask):
    """A stranger's run folder, whose sums are right."""
    listening[0] = False
    run = paceline.train(run_file("llama", **{"train.steps": 1}), tmp_path, show=False).path
    listening[0] = True
    kept = run / "kept"
    edit(kept / "config.json", values)
    files = [file for file in kept.rglob("*") if file.is_file() and file.name != KEPT_SUMS]
    write_sealed(kept / KEPT_SUMS, {str(file.relative_to(kept)): hash_file(file) for file in files})
    for words in (["predict", run, "a text"], ["export", run, "--out", tmp_path / "out"]):
        answer = ask(*words)
        assert answer.code == 2
        assert "would load code from elsewhere" in answer.err
    assert not (tmp_path / "out").exists()
    assert watched == []


def test_code_templates_and_adapters_beside_a_model_are_left_alone(folder, run_file, tmp_path, watched):
    """auto_map, a tokenizer class, a chat template, custom generation, an adapter, kernels: named, not used."""
    (folder / "planted.py").write_text(PLANTED)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(PLANTED)
    code = {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}
    code["AutoTokenizer"] = ["planted.T", None]
    pipelines = {"mine": {"impl": "planted.Pipeline", "pt": ["AutoModelForCausalLM"]}}
    edit(folder / "config.json", {"auto_map": code, "custom_pipelines": pipelines, "use_kernels": True})
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include 'planted.py' %}"
    tokenizer = {"auto_map": code, "tokenizer_class": "PlantedTokenizer", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": str(folder), "max_length": 10**9}))
    adapter = {"peft_type": "LORA", "auto_mapping": {"parent_library": "planted"}, "base_model_name_or_path": "x/y"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    spec = run_file("llama", **{"model.init_from": str(folder), "train.steps": 1})
    result = paceline.train(spec, tmp_path, show=False)
    paceline.plan(spec)
    paceline.export(result.path, tmp_path / "out")
    assert watched == []
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"auto_map", "custom_pipelines", "use_kernels"} & written.keys()
    assert not list((tmp_path / "out").rglob("*.py"))


FAKE_KERNELS = """
from pathlib import Path
class Any_:
    def __init__(self, *a, **k): pass
    def __class_getitem__(cls, item): return cls
CUDAProperties = Device = KernelizeFallback = LayerRepository = LocalLayerRepository = Mode = ROCMProperties = Any_
def get_kernel(*names, **more):
    Path({mark!r}).write_text(str(names)); raise RuntimeError("fetched")
def _pass(*a, **k):
    return lambda x: x
register_kernel_mapping = replace_kernel_forward_from_hub = use_kernel_mapping = kernelize = _pass
use_kernel_forward_from_hub = use_kernelized_func = get_local_kernel = get_loaded_kernels = has_kernel = _pass
"""
BUILD = """
import json, sys
from pathlib import Path
from transformers.integrations import hub_kernels
assert hub_kernels.is_kernels_available(), "the package is taken for the real one"
from paceline.errors import UserError
from paceline.workloads.transformers.build import build_config, build_transformer
from paceline.workloads.transformers.model_files import ConfigFile
import torch
for values, task in json.loads(sys.argv[1]):
    try:
        model = build_transformer(build_config(ConfigFile(Path("config.json"), values)), task)
        print("built", values["model_type"])
    except UserError as error:
        print("rejected", values["model_type"], error)
"""


def test_no_kernel_of_the_hub_is_loaded_even_where_its_loader_is_installed(tmp_path):
    """For known names of attention, which fall back on such kernels, and for architectures that ask for one."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    mark = tmp_path / "fetched"
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_KERNELS.format(mark=str(mark)))
    about = tmp_path / "site" / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (about / "top_level.txt").write_text("kernels\n")
    sides = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}
    rows = [
        ({"model_type": "llama", **sides, "attn_implementation": "flash_attention_2"}, "causal_lm"),
        ({"model_type": "gpt_oss", **sides, "attn_implementation": "flash_attention_3", "head_dim": 8}, "causal_lm"),
        ({"model_type": "rwkv", **sides}, "causal_lm"),
        ({"model_type": "mamba2", **sides, "num_heads": 8, "head_dim": 8}, "causal_lm"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])}
    command = [sys.executable, "-c", BUILD, json.dumps(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(rows), done.stdout
    assert not mark.exists(), mark.read_text()


def test_an_index_leads_to_no_file_elsewhere(folder, run_file, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"other\.safetensors"):
        paceline.train(run_file("llama", **{"model.init_from": str(folder)}), tmp_path / "runs", show=False)
