"""Which modules a rank tells that it has imported after torch, and which variables have changed."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from ft_client.rank.monitoring.imported_modules import MAX_CHANGED, MAX_NAMES, after_torch, changed
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.messages import ModulesImported

SITE = "/venv/lib/python3.11/site-packages"


class Lazy(ModuleType):
    """As `importlib.util.LazyLoader` makes them: an access of any attribute loads it."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError("it was loaded")


def module(name: str, origin: str | None) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, origin=origin)
    return made


def test_modules_of_installed_packages_after_torch() -> None:
    modules: dict[str, object] = {
        "sympy": module("sympy", f"{SITE}/sympy/__init__.py"),
        "torch": module("torch", f"{SITE}/torch/__init__.py"),
        "torch._dynamo": module("torch._dynamo", f"{SITE}/torch/_dynamo/__init__.py"),
        "asyncio": module("asyncio", "/usr/lib/python3/dist-packages/asyncio/__init__.py"),
        "ft_client": module("ft_client", f"{SITE}/ft_client/__init__.py"),
        "mine": module("mine", "/srv/me/mine.py"),
        "bare": module("bare", None),
        "itself": object(),
        "lazy": Lazy("lazy"),
        "apt": module("apt", "/usr/lib/python3/dist-packages/apt/__init__.py"),
    }
    assert after_torch(modules) == ["torch._dynamo", "apt"]
    assert after_torch({"sympy": modules["sympy"]}) == []


@pytest.mark.parametrize("letters", [3, 30, 3000])
def test_what_is_told_fits_into_a_message(letters: int) -> None:
    names = [f"{'ä' * letters}{number}" for number in range(2 * MAX_NAMES)]
    modules: dict[str, object] = {name: module(name, f"{SITE}/x.py") for name in ["torch", *names]}
    values = changed({}, {f"N{number}": "ä" * letters for number in range(2 * MAX_CHANGED)})
    told = after_torch(modules)
    assert told == names[: len(told)]
    assert len(told) <= MAX_NAMES and len(values) <= MAX_CHANGED
    assert len(codec.encode(ModulesImported(told, values), 1, 1)) < codec.MAX_MESSAGE


def test_variables_that_have_changed() -> None:
    assert changed({"A": "1", "B": "2", "C": "3"}, {"A": "1", "B": "3", "D": ""}) == {"B": "3", "C": None, "D": ""}
