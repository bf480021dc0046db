"""Names that an import exchanges in other modules: which ones are found, put back and given again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from ft_launcher.node.zygote.exchanged_names import Holdings, Place, WatchedNames, in_order
from ft_launcher.node.zygote.hidden_parts import HiddenParts
from ft_launcher.node.zygote.import_recorder import Part

CODE = """
limit = 1000
text = "one"
def usual(): return 1
class Kind:
    limit = 1
    def usual(self): return 1
class _Own: pass
_state = None
"""


class MakesNames(ModuleType):
    """A module that makes the names that it is asked for, as `torch.ops` does."""


@pytest.fixture
def of_one() -> Iterator[ModuleType]:
    made = ModuleType("exchanged_one")
    sys.modules[made.__name__] = made
    exec(CODE, vars(made))
    yield made
    del sys.modules[made.__name__]


def new() -> int:
    return 2


def equal_values(module: ModuleType) -> None:
    module.limit, module.text = int("1000"), "".join(["on", "e"])  # type: ignore[attr-defined]


def own_state(module: ModuleType) -> None:
    module._state, module.__warningregistry__ = 1, {}  # type: ignore[attr-defined]


def in_class(module: ModuleType) -> None:
    module.Kind.usual = new
    module.Kind.added = 1
    del module.Kind.limit


@pytest.mark.parametrize(
    ("exchange", "found"),
    [
        (lambda module: setattr(module, "usual", new), ["usual"]),
        (lambda module: setattr(module, "limit", 2), ["limit"]),
        (lambda module: setattr(module, "added", None), ["added"]),
        (lambda module: delattr(module, "text"), ["text"]),
        (lambda module: setattr(module, "_state", new), ["_state"]),
        (lambda module: setattr(module, "_Own", new), ["_Own"]),
        (in_class, ["Kind.added", "Kind.limit", "Kind.usual"]),
        (own_state, []),
        (equal_values, []),
    ],
)
def test_what_is_found_and_put_back(
    of_one: ModuleType, exchange: Callable[[ModuleType], None], found: list[str]
) -> None:
    before, names, of_kind = Holdings({"exchanged_one": of_one}), dict(vars(of_one)), dict(vars(of_one.Kind))
    exchange(of_one)
    after, kind_after = dict(vars(of_one)), dict(vars(of_one.Kind))
    exchanges = before.exchanges()
    assert sorted(str(one.place) for one in exchanges) == [f"exchanged_one.{name}" for name in found]
    for one in reversed(exchanges):
        one.undo()
    if found:
        assert (dict(vars(of_one)), dict(vars(of_one.Kind))) == (names, of_kind)
    for one in exchanges:
        one.redo()
    assert (dict(vars(of_one)), dict(vars(of_one.Kind))) == (after, kind_after)


def test_a_module_as_a_name_of_its_package_is_none(of_one: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Holdings({"exchanged_one": of_one})
    monkeypatch.setitem(sys.modules, "exchanged_one.part", ModuleType("exchanged_one.part"))
    of_one.part = sys.modules["exchanged_one.part"]  # type: ignore[attr-defined]
    assert before.exchanges() == []


def parts_that_exchange(of_one: ModuleType, *names: str) -> HiddenParts:
    """Modules of these names, each of which has exchanged `usual`, one after the other."""
    watched, parts = WatchedNames([Place("exchanged_one", "", "usual")]), {}
    for name in names:
        of_one.usual = lambda name=name: name  # type: ignore[attr-defined]
        parts[name] = Part(name, ModuleType(name), exchanges=watched.exchanges())
    found = HiddenParts()
    found.add(parts)
    return found


def test_a_module_comes_with_the_exchanges_before_its_own(of_one: ModuleType) -> None:
    usual = of_one.usual
    parts = parts_that_exchange(of_one, "exchanging_a", "exchanging_b")
    try:
        for order in (["exchanging_a", "exchanging_b"], ["exchanging_b", "exchanging_a"]):
            parts.hide()
            assert of_one.usual is usual
            for name in order:
                assert parts.exchanged_by_script([name]) == []
                parts.show([name])
                assert order[0] == "exchanging_b" or of_one.usual() == name
            assert of_one.usual() == "exchanging_b"
    finally:
        parts.hide()


def test_what_the_script_has_exchanged_stays_and_is_told(of_one: ModuleType) -> None:
    parts = parts_that_exchange(of_one, "exchanging_a")
    parts.hide()
    of_one.usual = new  # type: ignore[attr-defined]
    assert parts.exchanged_by_script(["exchanging_a"]) == ["exchanged_one.usual"]
    assert parts.exchanged_by_script(["exchanging_b"]) == []
    parts.show(["exchanging_a"])
    assert of_one.usual is new
    parts.hide()


def test_a_name_that_is_made_at_a_look_up_is_none() -> None:
    makes = MakesNames("exchanged_two")
    before = Holdings({"exchanged_two": makes})
    makes.made = 1  # type: ignore[attr-defined]
    assert before.exchanges() == []


def test_each_exchange_comes_once_and_in_order(of_one: ModuleType) -> None:
    before = Holdings({"exchanged_one": of_one})
    of_one.usual, of_one.limit = new, 1  # type: ignore[attr-defined]
    made = before.exchanges()
    assert in_order([*reversed(made), *made]) == made
