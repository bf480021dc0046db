"""Functions as users annotate them, all annotations being texts; one name is for type checkers only."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.call_wrapper import CallWrapper as Renamed
from tests.client.inprocess import wrapped

if TYPE_CHECKING:
    from somewhere import inprocess  # type: ignore[import-not-found]


def plain(a: int, w: CallWrapper) -> None: ...
def optional(a: int, w: Optional[CallWrapper] = None) -> None: ...  # noqa: UP045
def union(a: int, w: Union[CallWrapper, None] = None) -> None: ...  # noqa: UP007
def new_union(a: int, w: None | CallWrapper = None) -> None: ...  # noqa: RUF036
def quoted(a: int, w: Optional["CallWrapper"] = None) -> None: ...  # noqa: UP037, UP045
def renamed(a: int, w: Renamed) -> None: ...
def by_module(a: int, w: wrapped.CallWrapper | None = None) -> None: ...
def unknown(a: int, w: inprocess.CallWrapper) -> None: ...
def unknown_optional(a: int, w: typing.Optional[inprocess.CallWrapper] = None) -> None: ...  # noqa: UP045
def unknown_typing(a: int, w: Optional[inprocess.CallWrapper] = None) -> None: ...  # noqa: UP045
def unknown_union(a: int, w: Union[None, inprocess.CallWrapper] = None) -> None: ...  # noqa: RUF036, UP007
def unknown_new_union(a: int, w: inprocess.CallWrapper | None = None) -> None: ...
def unknown_quoted(a: int, w: Optional["inprocess.CallWrapper"] = None) -> None: ...  # noqa: UP037, UP045


def others(
    a: list[int],
    b: Literal["CallWrapper"],
    c: object,
    d: Callable[..., Any],
    e: list[CallWrapper],
    f: int | str | None,
    g: CallWrapper | int | None,
    h: type[CallWrapper],
    i: inprocess.Wrapper,
    j: inprocess.CallWrapper | inprocess.Other,
    k: list[inprocess.CallWrapper],
    m: nothing.at_all,  # type: ignore  # noqa: F821
    *args: CallWrapper,
    **kwargs: CallWrapper,
) -> None: ...
