"""Models of transformers, planned: the closed form against the library's own models, without memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from paceline.config import build_spec
from paceline.planner.cost_model import build_cost_model
from paceline.planner.plan import plan
from paceline.workload import build_workload, find_repeated_layers
from paceline.workloads.transformers import lora
from paceline.workloads.transformers.architectures import ARCHITECTURES, sizes_of
from paceline.workloads.transformers.build import build_config, build_sized_config, build_transformer
from paceline.workloads.transformers.model_files import ConfigFile, read_config, suggest_settings
from paceline.workloads.transformers.sections import TASKS
from results import expect_error

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
SIDES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 80}
DISTILBERT = {"dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80}
EXPERTS = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
EXPERTS |= {"shared_expert_intermediate_size": 56}
SIZES = {**SIDES, **EXPERTS, **HEADS, **GPT2, **DISTILBERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_7B = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
LLAMA_7B |= {"num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False}


def saved_config(kind, folder, **more):
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **more})
    file = folder / "config.json"
    file.write_text(config.to_json_string(use_diff=False))
    return config, file


def write_spec(folder, config, model=None, **values):
    """The run file of a model of which there is a config alone."""
    (folder / "config.json").write_text(json.dumps(config))
    model = {"config": str(folder / "config.json"), **(model or {})}
    return build_spec({"workload": "transformers", "model": model, **values})


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parameters_are_those_of_the_library(kind, tmp_path):
    import transformers

    config, file = saved_config(kind, tmp_path, num_labels=5)
    sizes = sizes_of(json.loads(file.read_text()))
    seen = 0
    for auto, classes in ((transformers.AutoModelForCausalLM, 0), (transformers.AutoModelForSequenceClassification, 5)):
        if type(config) not in auto._model_mapping or (not classes and not sizes.causal):
            continue
        with torch.device("meta"):
            model = auto.from_config(config)
        assert sizes.parameters(classes) == sum(p.numel() for p in model.parameters())
        blocks = find_repeated_layers(model)
        lora.add_adapters(blocks, (), 4, 1.0)
        added = [p for name, p in blocks[0].named_parameters() if "lora" in name]
        assert sizes.adapters(4) == sum(p.numel() for p in added)
        seen += 1
    assert seen


@pytest.mark.parametrize(
    "kind", [kind for kind, row in ARCHITECTURES.items() if "num_key_value_heads" in row.get("defaults", {})]
)
def test_missing_keys_have_library_defaults(kind, tmp_path):
    config, _ = saved_config(kind, tmp_path, hidden_size=64, num_attention_heads=32)
    values = {name: value for name, value in config.to_dict().items() if name not in ARCHITECTURES[kind]["defaults"]}
    values |= {"mlp_bias": True, "qkv_bias": False}  # which few of these architectures have
    model = build_transformer(build_sized_config(ConfigFile(tmp_path / "config.json", values)), "causal_lm")
    assert sizes_of(values).parameters() == sum(p.numel() for p in model.parameters())


def test_foreign_config_is_rejected(tmp_path):
    with expect_error("missing-value", "model.init_from"):
        build_cost_model(build_spec({"workload": "transformers"}))
    foreign = {"model_type": "opt", "hidden_dim": 48, "num_layers": 3, "n_head": 4, "vocab_size": 97}
    with expect_error("invalid-data", "hidden_size"):
        build_sized_config(ConfigFile(tmp_path / "config.json", foreign))
    with expect_error("invalid-data"):  # as the library
        sizes_of({**SIZES, "model_type": "llama", "num_attention_heads": 5})
    assert sizes_of({**SIZES, "model_type": "qwen3", "num_attention_heads": 5}) is not None
    assert sizes_of({**SIZES, "model_type": "gpt2", "add_cross_attention": True}) is None
    _, file = saved_config("llama", tmp_path, architectures=["LlamaForCausalLMEagle3"])
    model = build_cost_model(
        build_spec({"workload": "transformers", "model": {"config": str(file)}, "train": {"steps": 1}})
    )
    assert [said for said in model.assumptions if "LlamaForCausalLMEagle3" in said]


DECODERS = {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 3, "num_heads": 4, "num_decoder_layers": 2}
DECODERS |= {"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
DECODERS |= {"encoder_ffn_dim": 80, "decoder_ffn_dim": 72, "image_size": 32, "patch_size": 8, "embedding_size": 24}
COUNTED = {
    "seq2seq_lm": "t5 mt5 longt5 switch_transformers bart mbart pegasus marian blenderbot m2m_100 plbart pegasus_x",
    "masked_lm": "bert roberta distilbert electra albert mpnet deberta deberta-v2 convbert modernbert esm roformer",
    "token_classification": "bert roberta distilbert deberta-v2 gpt2 llama qwen2 mpnet",
    "image_classification": "vit dinov2 beit vit_msn data2vec-vision ijepa",
    "causal_lm": "opt bloom olmo2 stablelm starcoder2 gptj codegen phi cohere",
}


@pytest.mark.parametrize(("task", "kind"), [(task, kind) for task, kinds in COUNTED.items() for kind in kinds.split()])
def test_parameters_of_every_task(task, kind, tmp_path):
    import transformers

    config, file = saved_config(kind, tmp_path, **DECODERS)
    with torch.device("meta"):
        model = getattr(transformers, TASKS[task].auto).from_config(config)
    values = {"workload": "transformers", "model": {"config": str(file), "task": task}}
    cost_model = build_cost_model(build_spec(values))
    assert cost_model.params == sum(p.numel() for p in model.parameters())
    assert f"{kind} has no formula here" in " ".join(cost_model.assumptions)


def test_plan_without_torch(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B))
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        f"try: main(['plan', '--hf', {str(file)!r}, '--cluster', '4x4090', '--lora', '8', 'train.precision=bf16'])\n"
        "except SystemExit as end: assert not end.code, end\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "6.76 B parameters (20 M trained)" in done.stdout
    assert "samples of 256 tokens" in done.stdout


def test_memory_of_frozen_weights(tmp_path):
    spec = write_spec(tmp_path, LLAMA_7B, train={"global_batch": 8})
    plans = (plan(spec.replace({"model.lora_rank": rank}), cluster="8xH200", devices=[1]) for rank in (0, 8))
    prices = [found.rows[0].price for found in plans]
    whole, adapted = (price.memory for price in prices)
    trained = 32 * 8 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert adapted.weights_bytes - whole.weights_bytes == 4 * trained
    assert adapted.states_bytes == 8 * trained
    assert whole.states_bytes == 8 * (whole.weights_bytes / 4)
    assert 1.2 < prices[0].step_s / prices[1].step_s < 1.6  # two products of three are left

    half = spec.replace({"model.lora_rank": 8, "train.precision": "bf16"})
    wide = plan(half, cluster="8xH200", devices=[1])
    assert any("frozen weights in fp32" in line for line in wide.cost_model.assumptions)
    write_spec(tmp_path, {**LLAMA_7B, "dtype": "bfloat16"})
    kept = plan(half, cluster="8xH200", devices=[1])
    products = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    saved = wide.rows[0].price.memory.weights_bytes - kept.rows[0].price.memory.weights_bytes
    assert saved == 2 * products


@pytest.mark.parametrize("lora", [0, 16])
def test_no_rank_holds_a_70b_model(lora, tmp_path):
    """Layers are gathered in 16 bits, one after the other; nothing of the rest is kept twice."""
    sides = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_key_value_heads": 8}
    sides |= {"num_hidden_layers": 80, "num_attention_heads": 64, "dtype": "bfloat16"}
    train = {"precision": "bf16", "global_batch": 128}
    spec = write_spec(tmp_path, {**LLAMA_7B, **sides}, {"lora_rank": lora}, data={"sequence": 4096}, train=train)
    price = plan(spec, cluster="8x8xH100", devices=[64]).rows[0].price
    assert price.layout.strategy in ("fsdp", "hsdp")
    assert not price.tight
    assert price.memory.casts_bytes == 0
    assert price.memory.gathered_bytes < 25e9  # embedding and head, and two layers of 0.86 billion


@pytest.mark.parametrize(("words", "said"), CASES["plans"])
def test_rejected_plans(words, said, tmp_path, ask):
    (tmp_path / "strange.json").write_text('{"model_type": "strange"}')
    (tmp_path / "deep.json").write_text('{"model_type": "opt", "text_config": {"num_hidden_layers": 2147483647}}')
    (tmp_path / "stages.json").write_text('{"model_type": "resnet", "depths": [3, 10000000]}')
    (tmp_path / "named.json").write_text('{"model_type": "bert", "num_labels": 1000000000}')
    (tmp_path / "wide.json").write_text(f'{{"model_type": "llama", "vocab_size": {10**400}}}')
    (tmp_path / "llama.json").write_text('{"model_type": "llama"}')
    (tmp_path / "text.json").write_text("hidden_size: 4096")
    answer = ask("plan", *(word.replace("FOLDER", str(tmp_path)) for word in words))
    lines = answer.err.strip().splitlines()
    assert (answer.code, len(lines)) == (2, 1)
    assert said in lines[0]


@pytest.mark.parametrize(("values", "settings"), CASES["suggested"])
def test_a_config_says_task_precision_and_length(values, settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values}))
    assert suggest_settings(str(tmp_path / "config.json")) == settings


def test_cost_of_experts(tmp_path):
    sides = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    shared = {**sides, "vocab_size": 32000, "intermediate_size": 14336, "num_experts_per_tok": 2}
    flops = {}
    for kind, experts in (("mistral", 0), ("mixtral", 8), ("mixtral", 16)):
        config = {"model_type": kind, **shared, "num_local_experts": experts}
        found = build_cost_model(write_spec(tmp_path, config, data={"sequence": 4096}))
        flops[experts] = found.flops_per_sample
        if experts == 8:
            assert found.params == pytest.approx(46.7e9, rel=0.01)
            assert found.splits.experts == 8
    assert flops[8] == flops[16]
    assert 1.5 < flops[8] / flops[0] < 2


@pytest.mark.parametrize(("kind", "task"), [("llama", "causal_lm"), ("bert", "sequence_classification")])
def test_frozen_groups_are_not_trained(kind, task, tmp_path):
    _, file = saved_config(kind, tmp_path, num_labels=5)
    asked = {"workload": "transformers", "model": {"config": str(file), "task": task}, "train": {"steps": 10}}
    groups = {"*layer*.[01].*": {"frozen": True}, "*embed*": {"frozen": True}}
    usual, some = (build_cost_model(build_spec({**asked, "train": {"steps": 10, "groups": g}})) for g in ({}, groups))
    sizes = sizes_of(json.loads(file.read_text()))
    assert usual.trained_params == usual.params == some.params
    assert some.trained_params == pytest.approx(usual.params - sizes.tables - 2 * sizes.layer)


def drawn(spec):
    return build_workload(spec).model()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_meta_model_is_drawn_as_the_library_does(kind, hf, run_file):
    import transformers

    task = {"model.task": "sequence_classification"} if kind == "bert" else {}
    spec = run_file(kind, **task)
    config = build_config(read_config(spec.model))
    auto = transformers.AutoModelForSequenceClassification if task else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    theirs, ours = auto.from_config(config), drawn(spec)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a.isfinite().all(), name
        assert torch.equal(a, b) if b.std() == 0 else 0.7 < (a.std() / b.std()).item() < 1.4, name
    assert kind != "gpt2" or ours.lm_head.weight is ours.transformer.wte.weight
    again = drawn(spec)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    other = drawn(spec.replace({"train.seed": 1}))
    assert not all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))
