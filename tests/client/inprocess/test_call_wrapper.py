"""Who gets the CallWrapper, and with which arguments the function is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import pytest

from ft_client.inprocess.call_wrapper import CallParameters, CallWrapper
from tests.client.inprocess import wrapped

WRAPPER = object()


def annotated(annotation: object) -> Callable[..., None]:
    """A function whose second parameter has this annotation, which is not text."""

    def function(a, w): ...  # type: ignore[no-untyped-def]

    function.__annotations__["w"] = annotation
    return function


def by_name(a, call_wrapper, inprocess_call_wrapper: "int", other_call_wrapper): ...  # type: ignore[no-untyped-def]  # noqa: UP037


def passes_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


class Trainer:
    def train(self, a: int, w: CallWrapper) -> None: ...

    def __call__(self, w: CallWrapper, a: int) -> None: ...


class Another(CallWrapper):
    pass


@pytest.mark.parametrize(
    ("function", "names"),
    [
        *((getattr(wrapped, name), ("w",)) for name in vars(wrapped) if "union" in name or "optional" in name),
        *((getattr(wrapped, name), ("w",)) for name in ("plain", "quoted", "renamed", "by_module", "unknown")),
        *((getattr(wrapped, name), ("w",)) for name in ("unknown_typing", "unknown_quoted")),
        (wrapped.others, ()),
        (annotated(CallWrapper), ("w",)),
        (annotated(Optional[CallWrapper]), ("w",)),  # noqa: UP045
        (annotated(Optional["CallWrapper"]), ("w",)),
        (annotated(CallWrapper | None), ("w",)),
        (annotated("CallWrapper"), ("w",)),
        (annotated(" CallWrapper\n"), ("w",)),
        (annotated(Another), ()),
        (annotated(object), ()),
        (annotated(list[int]), ()),
        (annotated(Callable[..., CallWrapper]), ()),
        (annotated(CallWrapper | int), ()),
        (annotated(None), ()),
        (annotated(3), ()),
        (annotated("not a type"), ()),
        (annotated("1 / 0"), ()),
        (annotated("'CallWrapper'"), ()),
        (by_name, ("call_wrapper", "inprocess_call_wrapper")),
        (Trainer().train, ("w",)),
        (Trainer.train, ("w",)),
        (Trainer(), ("w",)),
        (passes_on(wrapped.plain), ("w",)),
        (functools.partial(wrapped.plain, 1), ("w",)),
        (functools.partial(passes_on(wrapped.unknown), a=1), ("w",)),
        (lambda *args, **kwargs: None, ()),
        (lambda *call_wrapper: None, ()),
        (max, ()),
    ],
)
def test_names(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    assert CallParameters(function).names == names


def last(a: Any, b: Any = 2, call_wrapper: Any = None) -> Any:
    return a, b, call_wrapper


def first(call_wrapper: Any, a: Any, b: Any = 2) -> Any:
    return a, b, call_wrapper


def positional(a: Any, call_wrapper: Any, /, b: Any = 2) -> Any:
    return a, b, call_wrapper


def keyword(a: Any, *, call_wrapper: Any, b: Any = 2) -> Any:
    return a, b, call_wrapper


def rest(a: Any, call_wrapper: Any = None, *b: Any) -> Any:
    return a, b, call_wrapper


def more(a: Any, call_wrapper: Any = None, **b: Any) -> Any:
    return a, b, call_wrapper


def twice(a: Any, call_wrapper: Any, b: Any, inprocess_call_wrapper: Any) -> Any:
    return a, b, inprocess_call_wrapper if inprocess_call_wrapper is call_wrapper else None


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "result"),
    [
        (last, (1,), {}, (1, 2)),
        (last, (1, 3), {}, (1, 3)),
        (last, (1,), {"call_wrapper": None}, (1, 2)),
        (last, (1, 3, None), {}, (1, 3)),
        (last, (), {"b": 3, "a": 1}, (1, 3)),
        (first, (1,), {}, (1, 2)),
        (first, (1, 3), {}, (1, 3)),
        (first, (None, 1, 3), {}, (1, 3)),
        (first, (), {"a": 1, "call_wrapper": 7}, (1, 2)),
        (positional, (1,), {}, (1, 2)),
        (positional, (1,), {"b": 3}, (1, 3)),
        (keyword, (1,), {"b": 3}, (1, 3)),
        (keyword, (), {"a": 1, "call_wrapper": None}, (1, 2)),
        (rest, (1, 2, 3), {}, (1, (2, 3))),
        (more, (1,), {"x": 2, "call_wrapper": None}, (1, {"x": 2})),
        (twice, (1, 2), {}, (1, 2)),
        (passes_on(last), (1, 3), {}, (1, 3)),
        (functools.partial(first, b=5), (1,), {}, (1, 5)),
    ],
)
def test_calls(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: tuple[Any, ...]
) -> None:
    given_args, given_kwargs = CallParameters(function).bind(WRAPPER, args, kwargs)
    assert function(*given_args, **given_kwargs) == (*result, WRAPPER)


def test_the_same_objects_each_time() -> None:
    parameters, batch = CallParameters(last), [1]
    for _ in range(2):
        args, _ = parameters.bind(WRAPPER, (batch,), {})
        assert args[0] is batch


@pytest.mark.parametrize("function", [last, first, keyword, twice])
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1,), {"nothing": 1}), ((1, 2, 3, 4, 5), {})])
def test_arguments_that_do_not_fit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        CallParameters(function).bind(WRAPPER, args, kwargs)


def test_a_function_that_wants_none() -> None:
    args, kwargs = CallParameters(max).bind(WRAPPER, (1, 2), {"key": None})
    assert max(*args, **kwargs) == 2
