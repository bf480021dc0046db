"""`AsyncRequest`: a save that the program's own queue carries out, as the peer's `AsyncCallsQueue` or Megatron's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class AsyncRequest(NamedTuple):
    """A function to be called in another process, and functions to be called on all ranks once it has ended there.

    It has one field less than the class of Megatron Core, `call_idx`. By that Core sees that it is not its own, and
    makes one of its own of it; what its persistent worker gets is dropped else.

    Attributes:
        async_fn: what writes. It is never None: Core's persistent worker gives no sign of the end of nothing, and the
            queue waits for that.
        async_fn_args: its arguments.
        finalize_fns: called after it on all ranks, in this order.
        async_fn_kwargs: its arguments by name.
        preload_fn: always None: tensors are on the host when the request is made.
        is_frozen: whether no function may be added any more.
    """

    async_fn: Callable[..., Any]
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any]
    preload_fn: Callable[..., Any] | None = None
    is_frozen: bool = False

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function that is called after those that are there.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("a frozen AsyncRequest takes no more functions")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Carries the request out at once. Collective."""
        import torch.distributed as dist

        self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = False) -> None:
        """Calls the functions. Collective. `validate_matching_call_idx` is accepted for the peer's queue; the functions
        themselves agree with the other ranks."""
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> AsyncRequest:
        """Returns the same request, to which no function can be added."""
        return self._replace(is_frozen=True)


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing: the function of a save that is refused."""
