"""Limit the time that tracing a model takes on the CPU: an operation that exceeds the budget is not started."""

import math
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.nn.op_counter import PRODUCTS, VIEWS, DispatchObserver

MAX_SECONDS = 1.5  # by an estimate that is an upper bound; usually it takes half as long
SECONDS_PER_CALL, SECONDS_PER_ELEMENT, SECONDS_PER_DRAW, SECONDS_PER_PAIR = 2e-5, 1e-9, 4e-9, 2e-11
"""Of one core: to call an operation at all, to read or write an element, to draw one, to multiply and add a pair."""
DRAWS = ("uniform", "normal", "bernoulli", "dropout", "rand")
UNTOUCHED = {*VIEWS, "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FACTORED = 20  # products of a matrix with itself that take as long as to factor it


class OverBudget(Exception):
    pass


class OpBudget(DispatchObserver):
    """`with OpBudget(): …` raises OverBudget before the operation that would exceed `MAX_SECONDS`."""

    spent_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in UNTOUCHED:
            self.spent_s += estimate_op_s(name, args)
            if self.spent_s > MAX_SECONDS:
                raise OverBudget
        return func(*args, **(kwargs or {}))


def estimate_op_s(name: str, args: Any) -> float:
    """Estimate an upper bound of the time of an aten operation from its arguments."""
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if given:
        elements = sum(x.numel() for x in given) + _broadcast_elements(given)
    else:  # factory functions have the sides of their tensor
        elements = max((math.prod(x) for x in args if isinstance(x, list | tuple)), default=0)
    each = SECONDS_PER_DRAW if any(word in name for word in DRAWS) else SECONDS_PER_ELEMENT
    return SECONDS_PER_CALL + each * elements + SECONDS_PER_PAIR * _count_multiply_adds(name, given)


def _broadcast_elements(given: list[Tensor]) -> int:
    """Count the elements of the result, if the operation is element-wise."""
    try:
        return math.prod(np.broadcast_shapes(*(x.shape for x in given)))  # torch's imports sympy
    except ValueError:
        return 0


def _count_multiply_adds(name: str, given: list[Tensor]) -> float:
    products = 2.0 if "backward" in name else 1.0
    if name.startswith("convolution"):
        *images, weight = given[: 3 if products > 1 else 2]
        return products * max(x.numel() / x.shape[1] for x in images) * weight.numel()
    if name in PRODUCTS:
        left, right = given[1:3] if "add" in name else given[:2]
        return left.numel() * right.shape[-1]
    if "attention" in name:
        return 2 * products * given[0].numel() * max(x.shape[-2] for x in given[:3])
    if "_rnn" in name:
        return products * given[0].numel() / given[0].shape[-1] * sum(x.numel() for x in given[1:])
    if "linalg" in name:
        return FACTORED * given[0].numel() * given[0].shape[-1]
    return 0.0
