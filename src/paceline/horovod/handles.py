"""Collectives under way: asked whether they are done, and waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """What an async form returns. The result is made once, when it is first asked for."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T]) -> None:
        """`works` are those of torch.distributed; none of them in a world of one."""
        self.works = works
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> T:
        if self._finish is not None:
            for work in self.works:
                work.wait()
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    __call__ = wait


def poll(handle: Handle[Any]) -> bool:
    return handle.done()


def synchronize(handle: Handle[T]) -> T:
    return handle.wait()


def combine_handles(handles: Sequence[Handle[T]]) -> Handle[list[T]]:
    """Several as one."""
    return Handle([work for handle in handles for work in handle.works], lambda: [handle.wait() for handle in handles])
