"""Rules for keys of other tools: what a value of such a key becomes in a run file.

Most are written in `tables/*.yaml`; `call: offload` there is `translate_offload` here.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

Entry = Mapping[str, Any]
"""A rule as the tables in `tables/*.yaml` write it."""


class Outcome(Enum):
    KEPT = "kept"
    """Under the same name with the same value, or what Paceline does in any case."""
    TRANSLATED = "translated"
    DERIVED = "derived"
    """Together with other keys it makes a value of the run file."""
    NOTED = "noted"
    """A comment in the run file: for the scheduler, for the shell, or for the script."""
    REPLACED = "replaced"
    """Another key takes precedence, as it did in the tool that both belong to."""
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Translation:
    """What a key of another tool becomes: `claims` are keys of the run file, or quantities that give keys."""

    outcome: Outcome
    claims: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    priority: int = 0
    """Of two claims that differ, the one of higher priority counts; equal ones are a contradiction."""
    file: str = ""
    """Another file that is named here, and is to be read as well."""
    review: bool = False
    """The user must look at it: an unknown word, a missing file."""


Rule = Callable[[Any], Translation]
"""From the value of a key; Unreadable where the value cannot be read."""


keep, note = partial(Translation, Outcome.KEPT, {}), partial(Translation, Outcome.NOTED, {})
reject = partial(Translation, Outcome.NOT_SUPPORTED, {})
accept, derive = partial(Translation, Outcome.TRANSLATED), partial(Translation, Outcome.DERIVED)
"""By outcome: the first three take a reason, the others claims."""
OFF, NOT_SET, FOR_SCHEDULER = keep("off"), keep("not set"), note("for the scheduler")
LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
SHARDS = {"full_shard": "fsdp", "shard_grad_op": "zero2", "no_shard": "ddp", "hybrid_shard": "hsdp"}
STRATEGIES = {"ddp": "ddp", "fsdp": "fsdp", "deepspeed": "zero2", "ddp_sharded": "zero2"}


class Unreadable(ValueError):
    """A value of the wrong type; the text says what it must be."""


def parse_int(value: Any) -> int:
    number = parse_number(value)
    if number % 1:  # infinity too
        raise Unreadable("a whole number")
    return int(number)


def parse_number(value: Any) -> float:
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # also of a whole number: no setting is too large for it
            return value if isinstance(value, int) else number
    raise Unreadable("a number")


def parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if (text := str(value).lower()) in ("true", "yes", "1", "false", "no", "0"):
        return text in ("true", "yes", "1")
    raise Unreadable("true or false")


def parse_word(value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise Unreadable("a word")


PARSERS: dict[str, Callable[[Any], Any]] = {"int": parse_int, "number": parse_number, "word": parse_word, "text": str}


def is_off(value: Any) -> bool:
    """Return whether a value is null, false, an empty text or list, or one of the words for none."""
    return value is None or value is False or value in ("", "no", "none", "off", "false", "None", "NO", [], {}, ())


def build_rule(entry: Entry) -> Rule:
    """Return the rule that an entry of a table describes; `call` names one of FUNCTIONS."""
    return FUNCTIONS[entry["call"]] if "call" in entry else partial(_apply_entry, entry)


def _apply_entry(entry: Entry, value: Any) -> Translation:
    if any(value == other and type(value) is type(other) for other in entry.get("ignored", ())):
        return OFF
    apply = next(apply for kind, apply in KINDS.items() if kind in entry)
    try:
        return apply(entry, value)
    except Unreadable:
        if "unreadable" not in entry:
            raise
        return note(entry["unreadable"])


def _claim(entry: Entry, value: Any) -> Translation:
    """`to` a key of the run file, or to a `quantity` that others are derived from; null leaves the default."""
    if value is None:
        return NOT_SET
    if "at_least" in entry and parse_number(value) < entry["at_least"]:
        return reject(entry["otherwise"])
    parsed = PARSERS[entry.get("as", "int")](value)
    if "off_below" in entry and parsed < entry["off_below"]:
        return OFF
    build, name = (accept, entry["to"]) if "to" in entry else (derive, entry["quantity"])
    return build({name: parsed}, entry.get("reason", ""), entry.get("priority", 0))


def _choose(entry: Entry, value: Any) -> Translation:
    """Choose one of several words, or a dotted name that ends with it; each with what it claims."""
    options = {str(word).lower(): dict(claims) for word, claims in entry["choice"].items()}
    text = str(value).lower()
    if value is False and "no" in options:  # what YAML makes of `no` without quotes
        text = "no"
    if isinstance(value, str) and text[:1].isalpha() and text not in options:
        text = text.rpartition(".")[2]
    if text not in options:
        return reject(entry["reason"])
    claims = options[text]
    reason = claims.pop("reason", "")
    return accept(claims, reason, entry.get("priority", 0)) if claims else keep(entry.get("kept", ""))


def _switch(entry: Entry, value: Any) -> Translation:
    """True or false: on, it claims something; off, nothing or what `otherwise` has."""
    if value is None:
        return NOT_SET
    claims = entry["switch"] if parse_bool(value) else entry.get("otherwise")
    return OFF if claims is None else accept(claims, entry.get("reason", ""), entry.get("priority", 0))


def _keep(entry: Entry, value: Any) -> Translation:
    """Accept a value that Paceline has in any case: one of `values`, or any without these; reject others."""
    values, reason = entry.get("values", ()), entry["keep"]
    words = {text for known in values for text in (str(known).lower(), repr(known))}
    equal = isinstance(value, int | float) and value in values
    if not values or value is None or equal or str(value).lower() in words:
        return keep(reason)
    return reject(entry.get("otherwise", f"here {reason}"))


def translate_file(value: Any) -> Translation:
    """Keep the name of a file whose settings are read too, unless the value means "off"."""
    return OFF if is_off(value) else Translation(Outcome.KEPT, file=str(value))


KINDS: dict[str, Callable[[Entry, Any], Translation]] = {
    "to": _claim,
    "quantity": _claim,
    "choice": _choose,
    "switch": _switch,
    "keep": _keep,
    "reject": lambda entry, value: OFF if is_off(value) else reject(entry["reject"]),
    "note": lambda entry, value: NOT_SET if value is None else note(entry["note"]),
    "file": lambda entry, value: translate_file(value),
}


def translate_offload(value: Any) -> Translation:
    """Translate an offload device: `cpu` or true; nvme is not supported."""
    if is_off(value):
        return OFF
    if value is True or value in ("cpu", "true"):
        return accept({"parallel.offload": True}, "offloads parameters and optimiser state together")
    return reject(f"state can live in host memory, not on {value}")


def translate_offload_param(value: Any) -> Translation:
    translation = translate_offload(value)
    return replace(translation, claims={"offload_param": True}) if translation.claims else translation


def translate_loggers(value: Any) -> Translation:
    """Translate a name, a class path, or a list of names."""
    if value is not None and not isinstance(value, str | list | bool):
        raise Unreadable("a name or a list of names")
    names = value if isinstance(value, list) else [value]
    if all(isinstance(name, bool) or is_off(name) or name == "all" for name in names):
        return keep("events are in the run folder")
    known = [next((logger for logger in LOGGERS if logger in str(name).lower()), None) for name in names]
    if None in known:
        return reject(f"loggers are {', '.join(LOGGERS)}, not {names[known.index(None)]}")
    return accept({"train.loggers": known})


def translate_bucket_size(value: Any) -> Translation:
    """Translate elements of 4 bytes to MB: gradients are fp32 here."""
    return accept({"parallel.bucket_mb": parse_number(value) * 4 / 1e6}, "as MB of fp32")


def translate_nodes(value: Any) -> Translation:
    """Translate a number of machines, or a range `2:4` of them."""
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


def _count_gpus(claim: str, value: Any) -> Translation:
    """`gpu:a100:2`, `a100:2`, `gpu:2` or `2`."""
    parts = [part for part in parse_word(value).split("(")[0].split(":") if part]
    if parts[:1] == ["gpu"]:
        parts = parts[1:] or ["1"]
    if "," in parse_word(value) or len(parts) > 2 or not parts:
        return FOR_SCHEDULER
    if len(parts) == 1 and not parts[0].isdecimal():
        parts.append("1")
    claims: dict[str, Any] = {claim: parse_int(parts[-1])}
    return derive({**claims, "device_name": parts[0]} if len(parts) == 2 else claims)


def translate_gres(value: Any) -> Translation:
    return _count_gpus("gpus_per_node", value) if parse_word(value).startswith("gpu") else FOR_SCHEDULER


def translate_strategy(value: Any) -> Translation:
    """Translate a strategy of Lightning, by its name or its class."""
    text = str(value).lower().removesuffix("strategy").split(".")[-1]
    if stage := re.fullmatch(r"deepspeed_stage_([123])(_offload)?", text):
        claims: dict[str, Any] = {"parallel.strategy": f"zero{stage[1]}"}
        return accept(claims | ({"parallel.offload": True} if stage[2] else {}))
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
    decay = parse_number(value)
    return accept({"train.weight_decay": decay} | ({"train.decay": "all"} if decay else {}))


def translate_epochs(value: Any) -> Translation:
    epochs = parse_number(value)
    if epochs % 1:  # infinity too
        return reject("a run has whole epochs; give its length as train.steps")
    return accept({"train.epochs": int(epochs)}) if epochs >= 1 else reject("a run has at least one epoch")


def translate_warmup_steps(value: Any) -> Translation:
    """Translate a number of steps, which takes precedence over a ratio, or below 1 a share of the run."""
    length = parse_number(value)
    if length == 0:
        return OFF
    return (
        accept({"train.warmup": length}) if length < 1 else accept({"train.warmup_steps": parse_int(value)}, priority=1)
    )


def translate_fsdp_words(value: Any) -> Translation:
    """`full_shard auto_wrap offload`, or a list of these words, or true."""
    if is_off(value):
        return OFF
    if value is True:
        return accept({"parallel.strategy": "fsdp"}, priority=-1)
    if not isinstance(value, str | list):
        raise Unreadable("words such as 'full_shard auto_wrap'")
    words = value.split() if isinstance(value, str) else [str(part) for part in value]
    ways = [SHARDS[part] for part in words if part in SHARDS]
    claims: dict[str, Any] = {"parallel.strategy": ways[0]} if ways else {}
    claims |= {"parallel.offload": True} if "offload" in words else {}
    return accept(claims) if claims else reject("no known word")


FUNCTIONS: dict[str, Rule] = {
    **{claim: partial(_count_gpus, claim) for claim in ("gpus", "gpus_per_node", "gpus_per_task")},
    **{name.removeprefix("translate_"): rule for name, rule in globals().items() if name.startswith("translate_")},
}
