"""Values that Optuna suggests, from what the trials so far have found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.sweeping.space import Choice, Space, Values


def check_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UserError("--optuna needs Optuna, which is not installed; type  pip install 'paceline[sweep]'") from None


def suggested(space: Space, before: Sequence[tuple[Values, float | None]], seed: int) -> Values:
    """The values of the next trial, by Optuna's usual sampler; `before` has those so far and their goodness.

    The same trials before, and the same seed, give the same values: a sweep that was stopped goes on as it would have.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    own = int(np.random.SeedSequence([seed, len(before)]).generate_state(1)[0])
    distributions = {key: _distribution(tried) for key, tried in space.items()}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=own))
    for values, goodness in before:
        params = {key: _inside(space[key], value) for key, value in values.items()}
        state = optuna.trial.TrialState.COMPLETE if goodness is not None else optuna.trial.TrialState.FAIL
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=goodness, state=state)
        )
    found = study.ask(distributions).params
    return {key: _outside(space[key], value) for key, value in found.items()}


def _distribution(tried: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(tried, Choice):
        return CategoricalDistribution(range(len(tried.values)))
    kind = IntDistribution if tried.whole else FloatDistribution
    return kind(tried.low, tried.high, log=tried.log)


def _inside(tried: Any, value: Any) -> Any:
    """Choices travel by their place: Optuna takes few kinds of values."""
    return tried.values.index(value) if isinstance(tried, Choice) else value


def _outside(tried: Any, value: Any) -> Any:
    if isinstance(tried, Choice):
        return tried.values[value]
    return value if tried.whole else tried.rounded(value)
