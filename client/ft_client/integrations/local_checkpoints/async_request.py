"""`AsyncRequest`: a save that the program's own queue carries out, as the peer's `AsyncCallsQueue` or Megatron's do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
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


class SentState:
    """A state on its way to the process that writes it.

    A forked process gets it as it is. A persistent worker gets a pickle, which a thread of a queue makes. What cannot
    be pickled is dropped there without a sign: the program's queue waits for its end for ever, and so do all later
    requests. So an object of this class can always be pickled: with its state, or with the reason why not.

    Args:
        state: what is written.
        unsendable: why the state cannot be sent by a pickle; empty: it is tried.
    """

    def __init__(self, state: Any, unsendable: str = "") -> None:
        self._state = state
        self._unsendable = unsendable
        self._content = b""
        self._problem = ""

    def __getstate__(self) -> dict[str, Any]:
        content, problem = b"", self._unsendable
        if not problem:
            try:
                content = bytes(ForkingPickler.dumps(self._state))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        return {"_state": None, "_unsendable": "", "_content": content, "_problem": problem}

    def take(self) -> Any:
        """Returns the state.

        Raises:
            RuntimeError: it could not be sent.
            Exception: whatever its objects raise as they are made.
        """
        if self._problem:
            raise RuntimeError(f"the state could not be sent to the process that writes it: {self._problem}")
        if self._content:
            return pickle.loads(self._content)
        return self._state
