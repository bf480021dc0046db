"""States are taken apart and put together again, whatever they hold."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.memory.state_tree import put_together, take_apart


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


@pytest.mark.parametrize("place", ["\0tensor 1", "\0tensor -5", "\0tensor x"])
def test_a_rest_that_names_a_tensor_that_is_not_there_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="not there"):
        put_together([place], [Tensor()])
