"""States are taken apart and put together again, whatever they hold."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.memory.state_tree import OtherStructure, put_together, take_apart, take_apart_again


class Tensor:
    """Stands for a tensor: equal only to itself."""


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.text().map("\0text ".__add__), st.builds(Tensor)
)
STATES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
    ),
    max_leaves=20,
)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@given(STATES)
def test_a_state_is_the_same_after_it_was_taken_apart(state: Any) -> None:
    apart = take_apart(state, is_tensor)
    assert put_together(apart.rest, list(apart.tensors.values())) == state


def test_tensors_are_named_by_their_path() -> None:
    state = {"state": {0: {"step": Tensor(), "exp_avg": Tensor()}}, "groups": [{"lr": 0.1, "betas": (Tensor(), 1)}]}
    apart = take_apart(state, is_tensor, "optimizer")
    assert list(apart.tensors) == [
        "optimizer.state.0.step",
        "optimizer.state.0.exp_avg",
        "optimizer.groups.0.betas.0",
    ]
    assert apart.others == {}


def test_two_tensors_with_one_path_have_two_names() -> None:
    one, other, third = Tensor(), Tensor(), Tensor()
    apart = take_apart({"a.b": one, "a": {"b": other}, "a.b#2": third}, is_tensor)
    assert len(apart.tensors) == 3
    assert put_together(apart.rest, list(apart.tensors.values())) == {"a.b": one, "a": {"b": other}, "a.b#2": third}


def test_containers_of_the_rest_are_copies_and_unknown_values_are_named() -> None:
    rates = [1, 2]
    state = {"rates": rates, "seen": {3}}
    apart = take_apart(state, is_tensor, "loader")
    rates.append(3)
    assert apart.rest["rates"] == [1, 2]
    assert apart.others == {"loader.seen": {3}}


def test_keys_of_unknown_types_are_named() -> None:
    state: Any = {"counts": {numpy.int64(3): 1, ("a", 2): 2, (1, numpy.int64(4)): 3, "b": {numpy.int64(3): 4}}}
    apart = take_apart(state, is_tensor, "loader")
    assert list(apart.others) == [
        "key 3 of loader.counts",
        f"key {(1, numpy.int64(4))} of loader.counts",
        "key 3 of loader.counts.b",
    ]
    assert put_together(apart.rest, []) == state


def retold(value: Any) -> Any:
    """A state of the same structure with other values."""
    if isinstance(value, (dict, OrderedDict)):
        return type(value)((key, retold(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(retold(item) for item in value)
    if is_tensor(value):
        return Tensor()
    return 7


@given(STATES)
def test_a_state_of_a_known_structure_is_taken_apart_alike(state: Any) -> None:
    before = take_apart(state, is_tensor)
    later = retold(state)
    rest, tensors = take_apart_again(later, before.rest, is_tensor)
    expected = take_apart(later, is_tensor)
    assert rest == expected.rest
    assert tensors == list(expected.tensors.values())
    assert put_together(rest, tensors) == later


TENSOR = Tensor()


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ({"a": TENSOR, "b": 1}, {"b": 1, "a": TENSOR}),
        ({"a": TENSOR}, {"c": TENSOR}),
        ({"a": TENSOR}, {"a": 1}),
        ({"a": 1}, {"a": TENSOR}),
        ({"a": TENSOR}, {"a": "\0tensor 0"}),
        ({"a": 1}, {"a": "\0tensor 0"}),
        ({"a": 1}, {"a": {3}}),
        ({"a": 1}, {"a": [1]}),
        ({"a": [1]}, {"a": 1}),
        ([TENSOR], [TENSOR, TENSOR]),
        ([TENSOR], (TENSOR,)),
        ({"a": TENSOR}, OrderedDict(a=TENSOR)),
        ({3: TENSOR}, {numpy.int64(3): TENSOR}),
    ],
)
def test_another_structure_is_found(before: Any, later: Any) -> None:
    with pytest.raises(OtherStructure):
        take_apart_again(later, take_apart(before, is_tensor).rest, is_tensor)


@pytest.mark.parametrize("place", ["\0tensor 1", "\0tensor -5", "\0tensor x"])
def test_a_rest_that_names_a_tensor_that_is_not_there_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="not there"):
        put_together([place], [Tensor()])
