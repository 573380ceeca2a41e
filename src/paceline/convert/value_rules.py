"""Rules that a table cannot express: `call: offload` in `tables/*.yaml` is `translate_offload` here."""

import re
from typing import Any

from paceline.convert.rules import (
    OFF,
    Rule,
    Translation,
    UnreadableValue,
    accept,
    derive,
    is_off,
    keep,
    note,
    parse_int,
    parse_number,
    parse_word,
    reject,
)

LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
SHARDS = {"full_shard": "fsdp", "shard_grad_op": "zero2", "no_shard": "ddp", "hybrid_shard": "hsdp"}
STRATEGIES = {"ddp": "ddp", "fsdp": "fsdp", "deepspeed": "zero2", "ddp_sharded": "zero2"}
FOR_SCHEDULER = note("for the scheduler")


def translate_offload(value: Any) -> Translation:
    """Translate an offload device: `cpu` or true; nvme is not supported."""
    if is_off(value):
        return OFF
    if value is True or value in ("cpu", "true"):
        return accept({"parallel.offload": True}, "offloads parameters and optimiser state together")
    return reject(f"state can live in host memory, not on {value}")


def translate_loggers(value: Any) -> Translation:
    """A name, a class path, or a list of names."""
    if value is not None and not isinstance(value, str | list | bool):
        raise UnreadableValue("a name or a list of names")
    names = value if isinstance(value, list) else [value]
    if all(isinstance(name, bool) or is_off(name) or name == "all" for name in names):
        return keep("events are in the run folder")
    known = [next((logger for logger in LOGGERS if logger in str(name).lower()), None) for name in names]
    if None in known:
        return reject(f"loggers are {', '.join(LOGGERS)}, not {names[known.index(None)]}")
    return accept({"train.loggers": known})


def translate_bucket_size(value: Any) -> Translation:
    """Elements of 4 bytes: gradients are fp32 here."""
    return accept({"parallel.bucket_mb": parse_number(value) * 4 / 1e6}, "as MB of fp32")


def translate_nodes(value: Any) -> Translation:
    """A number of machines, or a range `2:4` of them."""
    if isinstance(value, str) and (ends := re.fullmatch(r"(\d+)[:-](\d+)", value)):
        if ends[1] != ends[2]:
            return reject(f"{ends[1]} to {ends[2]} nodes: a run has one number of ranks, and resumes on any other")
        value = ends[1]
    return derive({"nodes": parse_int(value)})


def translate_devices_per_node(value: Any) -> Translation:
    if value in ("gpu", "cpu", "auto", "-1", -1, None):
        return reject("write how many as parallel.ranks")
    if isinstance(value, list):
        export = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, value))}"
        return derive({"per_node": len(value)}, export)
    return derive({"per_node": parse_int(value)})


def translate_hosts(value: Any) -> Translation:
    """`one:4,two:4`: nodes, with slots; the number of ranks is another option."""
    return derive({"nodes": len(parse_word(value).split(","))})


def _translate_gpus(claim: str) -> Rule:
    """`gpu:a100:2`, `a100:2`, `gpu:2` or `2`."""

    def rule(value: Any) -> Translation:
        parts = [part for part in parse_word(value).split("(")[0].split(":") if part]
        if parts[:1] == ["gpu"]:
            parts = parts[1:] or ["1"]
        if "," in parse_word(value) or len(parts) > 2 or not parts:
            return FOR_SCHEDULER
        if len(parts) == 1 and not parts[0].isdecimal():
            parts.append("1")
        claims: dict[str, Any] = {claim: parse_int(parts[-1])}
        if len(parts) == 2:
            claims["device_name"] = parts[0]
        return derive(claims)

    return rule


def translate_gres(value: Any) -> Translation:
    return _translate_gpus("gpus_per_node")(value) if parse_word(value).startswith("gpu") else FOR_SCHEDULER


def translate_strategy(value: Any) -> Translation:
    """A strategy of Lightning, by its name or its class."""
    text = str(value).lower().removesuffix("strategy").split(".")[-1]
    if stage := re.fullmatch(r"deepspeed_stage_([123])(_offload)?", text):
        claims: dict[str, Any] = {"parallel.strategy": f"zero{stage[1]}"}
        return accept({**claims, "parallel.offload": True} if stage[2] else claims)
    if text in ("auto", "singledevice", "single_device"):
        return keep("auto is ddp above one rank")
    name = re.sub(r"_(spawn|fork|notebook|find_unused_parameters_(true|false))", "", text)
    if name in STRATEGIES:
        return accept({"parallel.strategy": STRATEGIES[name]}, priority=-1)
    return reject("the strategies are ddp, fsdp and deepspeed's stages")


def translate_evaluate_every(value: Any) -> Translation:
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return accept({"train.evaluate_every": value})
    at_the_end = "the run is evaluated at the end of each epoch"
    return keep(at_the_end) if value in (1, None, "1", "1.0") else reject(at_the_end)


def translate_betas(value: Any) -> Translation:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return reject("it must be two numbers, as in [0.9, 0.999]")
    beta1, beta2 = map(parse_number, value)
    return accept({"train.beta1": beta1, "train.beta2": beta2})


def translate_weight_decay(value: Any) -> Translation:
    """torch decays every parameter; a run file, unless it is set otherwise, matrices alone."""
    claims: dict[str, Any] = {"train.weight_decay": parse_number(value)}
    return accept({**claims, "train.decay": "all"} if parse_number(value) else claims)


def translate_epochs(value: Any) -> Translation:
    if parse_number(value) % 1:  # infinity too
        return reject("a run has whole epochs; give its length as train.steps")
    if parse_number(value) < 1:
        return reject("a run has at least one epoch")
    return accept({"train.epochs": int(parse_number(value))})


def translate_warmup_steps(value: Any) -> Translation:
    """Translate a number of steps, which takes precedence over a ratio, or below 1 a share of the run."""
    if parse_number(value) == 0:
        return OFF
    if parse_number(value) < 1:
        return accept({"train.warmup": parse_number(value)})
    return accept({"train.warmup_steps": parse_int(value)}, priority=1)


def translate_fsdp_words(value: Any) -> Translation:
    """`full_shard auto_wrap offload`, or a list of these words, or true."""
    if is_off(value):
        return OFF
    if value is True:
        return accept({"parallel.strategy": "fsdp"}, priority=-1)
    if not isinstance(value, str | list):
        raise UnreadableValue("words such as 'full_shard auto_wrap'")
    words = value.split() if isinstance(value, str) else [str(part) for part in value]
    ways = [SHARDS[part] for part in words if part in SHARDS]
    claims: dict[str, Any] = {"parallel.strategy": ways[0]} if ways else {}
    if "offload" in words:
        claims["parallel.offload"] = True
    return accept(claims) if claims else reject("no known word")


FUNCTIONS: dict[str, Rule] = {
    "gpus": _translate_gpus("gpus"),
    "gpus_per_node": _translate_gpus("gpus_per_node"),
    **{name.removeprefix("translate_"): rule for name, rule in globals().items() if name.startswith("translate_")},
}
