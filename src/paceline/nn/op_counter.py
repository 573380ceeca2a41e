"""Count the operations of a forward pass while it runs, on real tensors or on fake ones."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"}
VIEWS = {"view", "t", "transpose", "expand", "permute", "reshape", "slice", "select", "detach", "unsqueeze", "squeeze"}
VIEWS |= {"_unsafe_view", "split", "split_with_sizes", "unbind", "alias", "as_strided", "empty", "sym_size"}


class DispatchObserver(TorchDispatchMode):
    """Sees every operation that is dispatched."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing the compiler, which takes seconds."""
        return False


class OperationCounter(DispatchObserver):
    """`with OperationCounter() as counter: model(x)` counts what is dispatched, but views and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.moved_elements = 0.0
        """Read and written by all but products and attention."""
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.counting and func.namespace == "aten" and (name := func.overloadpacket.__name__) not in VIEWS:
            self.count(name, args, out)
        return out

    def count(self, name: str, args: Any, out: Any) -> None:
        if name != "_to_copy":
            self.operations += 1
            self.moved_elements += count_moved_elements(name, args, out)


def is_product(name: str) -> bool:
    return name in PRODUCTS or "attention" in name


def count_moved_elements(name: str, args: Any, out: Any) -> float:
    """Return how many elements an operation reads and writes, if it is no product."""
    if is_product(name):
        return 0.0
    if name == "embedding":
        return 2.0 * out.numel()
    return float(sum(leaf.numel() for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)))
