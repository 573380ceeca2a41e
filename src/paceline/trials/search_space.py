"""Parse the values that a sweep tries, and enumerate, sample or suggest its trials."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunSpec, parse_overrides
from paceline.errors import UserError
from paceline.trainer.resume_guard import LENGTHS

MAX_TRIALS = 10_000
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
Values = dict[str, Any]


@dataclass(frozen=True)
class OneOf:
    values: tuple[Any, ...]

    def draw(self, random: np.random.Generator) -> Any:
        return self.values[int(random.integers(len(self.values)))]

    def __str__(self) -> str:
        return ",".join(map(str, self.values))


@dataclass(frozen=True)
class Range:
    """A number between two ends; an integer if both ends are."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, random: np.random.Generator) -> float:
        if self.whole and not self.log:
            return int(random.integers(int(self.low), int(self.high) + 1))
        if self.log:
            found = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            found = float(random.uniform(self.low, self.high))
        return round(found) if self.whole else self.rounded(found)

    def rounded(self, value: float) -> float:
        return min(max(float(f"{value:.6g}"), self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' * self.log}"


Space = dict[str, OneOf | Range]


def parse_space(given: Sequence[str] | Mapping[str, Any]) -> tuple[Space, Values]:
    """Return (what varies, values that all trials share) of words such as `train.lr=0.05,0.1`."""
    parsed: Space = {}
    pairs = given.items() if isinstance(given, Mapping) else (word.split("=", 1) for word in given)
    for key, *values in pairs:
        if not values:
            raise UserError(f"{key!r} has no values; write it as  section.key=VALUE,VALUE  or  section.key=LOW..HIGH")
        if key in parsed:
            raise UserError(f"{key} is given twice; write all of its values after one  {key}=")
        parsed[key] = _parse_values(key, values[0])
    lists = {key: tried.values for key, tried in parsed.items() if isinstance(tried, OneOf)}
    fixed = {key: values[0] for key, values in lists.items() if len(values) == 1}
    if len(fixed) == len(parsed):
        reason = f"{next(iter(fixed))} has one value" if fixed else "no key is given"
        raise UserError(f"nothing varies: {reason}; write it as  model.width=64,128  or  train.lr=1e-4..1e-2:log")
    return {key: tried for key, tried in parsed.items() if key not in fixed}, fixed


def _parse_values(key: str, value: Any) -> OneOf | Range:
    if isinstance(value, OneOf | Range):
        return value
    if isinstance(value, list | tuple):
        words = tuple(value)
    elif not isinstance(value, str):
        words = (value,)
    elif (ends := _RANGE.fullmatch(value.strip())) is not None:
        return _parse_range(key, *ends.groups())
    else:
        if ".." in value and re.match(_NUMBER, value):
            raise UserError(f"{key}={value} is not a range; write it as  {key}=1e-4..1e-2  or  {key}=1e-4..1e-2:log")
        listed = parse_overrides([f"{key}=[{value}]"])[key]
        if not isinstance(listed, list):
            raise UserError(f"{key}={value} is not a list of values; quote those with brackets or commas")
        words = tuple(map(_parse_number, listed))
    if not words:
        raise UserError(f"{key}={value} has no values; write some, with commas between them")
    return OneOf(tuple(word for number, word in enumerate(words) if word not in words[:number]))


def _parse_number(word: Any) -> Any:
    """Return a number for one that YAML reads as text, such as 3e-4."""
    return float(word) if isinstance(word, str) and re.fullmatch(_NUMBER, word) and "e" in word.lower() else word


def _parse_range(key: str, low: str, high: str, log: str | None) -> Range:
    numbers = [int(word) if re.fullmatch(r"[-+]?\d+", word) else float(word) for word in (low, high)]
    given = f"{key}={low}..{high}{log or ''}"
    if numbers[0] >= numbers[1]:
        raise UserError(f"{given}: the first number must be the smaller one")
    if log and numbers[0] <= 0:
        raise UserError(f"{given}: a logarithm needs numbers above 0; leave :log out, or start above 0")
    return Range(numbers[0], numbers[1], bool(log))


def enumerate_grid(space: Space) -> list[Values]:
    for key, tried in space.items():
        if isinstance(tried, Range):
            raise UserError(f"{key}={tried} is a range; draw from it with  --random --trials 20,  or list its values")
    choices = [tried.values for tried in space.values() if isinstance(tried, OneOf)]
    if (count := math.prod(map(len, choices))) > MAX_TRIALS:
        raise UserError(f"{count:,} combinations are too many; draw some of them with  --random --trials 100")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def sample_trials(space: Space, trials: int, seed: int) -> list[Values]:
    """Sample trials; trial k is the same, however many there are."""
    randoms = [np.random.default_rng([seed, number]) for number in range(trials)]
    return [{key: tried.draw(random) for key, tried in space.items()} for random in randoms]


def apply_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """Return the spec of a trial; a length replaces the other one, paths are relative to the current folder."""
    given = dict(values)
    for length, other in (LENGTHS, LENGTHS[::-1]):
        if length in given:
            given.setdefault(other, None)
    for key, value in values.items():
        section, _, name = key.partition(".")
        known = getattr(spec, section, None)
        if isinstance(value, str) and name in getattr(known, "paths", list)():
            given[key] = str(Path(value).expanduser().resolve())
    return spec.replace(given, "the sweep")


def check_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UserError("--optuna needs Optuna, which is not installed; type  pip install 'paceline[sweep]'") from None


def suggest_values(space: Space, before: Sequence[tuple[Values, float | None]], seed: int) -> Values:
    """Return the values of the next trial, by Optuna's usual sampler; `before` has those so far and their goodness.

    The same trials before, and the same seed, give the same values: a stopped sweep continues as it would have.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    own = int(np.random.SeedSequence([seed, len(before)]).generate_state(1)[0])
    distributions = {key: _to_distribution(tried) for key, tried in space.items()}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=own))
    for values, goodness in before:
        params = {key: _to_optuna(space[key], value) for key, value in values.items()}
        state = optuna.trial.TrialState.COMPLETE if goodness is not None else optuna.trial.TrialState.FAIL
        facts = {"params": params, "distributions": distributions, "value": goodness, "state": state}
        study.add_trial(optuna.trial.create_trial(**facts))
    return {key: _from_optuna(space[key], value) for key, value in study.ask(distributions).params.items()}


def _to_distribution(tried: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(tried, OneOf):
        return CategoricalDistribution(range(len(tried.values)))
    kind = IntDistribution if tried.whole else FloatDistribution
    return kind(tried.low, tried.high, log=tried.log)


def _to_optuna(tried: Any, value: Any) -> Any:
    """Convert to a distribution of Optuna. Choices are passed by index: it takes few types."""
    return tried.values.index(value) if isinstance(tried, OneOf) else value


def _from_optuna(tried: Any, value: Any) -> Any:
    if isinstance(tried, OneOf):
        return tried.values[value]
    return value if tried.whole else tried.rounded(value)
