"""Which modules the next zygote imports: a table of what their imports did in the trial."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ft_launcher.node.zygote.learned_modules import MAX_REASONS, Choice, Surroundings, Tried, choose

A = {"a": Tried({"a.b", "c"}, set()), "a.b": Tried({"a"}, {"HOME"}), "c": Tried({"json"}, set()), "d": Tried({"c"}, ())}
"""a needs a.b and c, d needs c."""
THREAD = {"c": Tried((), (), ["starts a thread", "changes sys.path"])}
CACHE = {"a.b": Tried({"a"}, {"CACHE"}, sets={"CACHE": "/tmp/cache"})}
SAME = "its import exchanges x.f, which another import exchanges too"
LATE = "its import reads HOME, which differs in ranks or is changed by the script"


@pytest.mark.parametrize(
    ("tried", "failed", "environ", "expected"),
    [
        pytest.param(A, {}, Surroundings(), Choice(["a", "a.b", "d"]), id="all"),
        pytest.param(
            A | THREAD,
            {},
            Surroundings(),
            Choice([], {"c": "its import starts a thread"}),
            id="an effect, and who needs it",
        ),
        pytest.param(A, {"d": "no"}, Surroundings(), Choice(["a", "a.b"], {"d": "no"}), id="an import that failed"),
        pytest.param(
            A | {"d": Tried({"c"}, (), installed=False)},
            {},
            Surroundings(),
            Choice(["a", "a.b"], {"d": "it is no file of an installed package"}),
            id="a file beside the script",
        ),
        pytest.param(
            A | {"c": Tried({"json"}, set(), exchanges=["x.f"])},
            {},
            Surroundings(),
            Choice(["a", "a.b", "d"]),
            id="a name that one module exchanges",
        ),
        pytest.param(
            A | {"a": Tried({"a.b", "c"}, (), exchanges=["x.f"]), "a.b": Tried({"a"}, (), exchanges=["x.f", "x.g"])},
            {},
            Surroundings(),
            Choice(["a", "a.b", "d"]),
            id="a name that two modules exchange which load each other",
        ),
        pytest.param(
            A | {"a": Tried({"a.b", "c"}, (), exchanges=["x.f"]), "c": Tried((), (), exchanges=["x.f"])},
            {},
            Surroundings(),
            Choice([], {"a": SAME, "c": SAME}),
            id="a name that two modules exchange of which one comes alone",
        ),
        pytest.param(A, {}, Surroundings(["HOME"]), Choice(["d"], {"a.b": LATE}), id="ranks differ"),
        pytest.param(A, {}, Surroundings([], {"HOME": "/b"}), Choice(["d"], {"a.b": LATE}), id="the script changes it"),
        pytest.param(A, {}, Surroundings([], {"HOME": None}), Choice(["d"], {"a.b": LATE}), id="the script removes it"),
        pytest.param(
            A | CACHE, {}, Surroundings([], {"CACHE": "/tmp/cache"}), Choice(["a", "a.b", "d"]), id="set by the import"
        ),
        pytest.param(
            A | CACHE,
            {},
            Surroundings([], {"CACHE": "/mine"}),
            Choice(["d"], {"a.b": LATE.replace("HOME", "CACHE")}),
            id="set by the script, and the import would",
        ),
    ],
)
def test_choice(tried: Mapping[str, Tried], failed: Mapping[str, str], environ: Surroundings, expected: Choice) -> None:
    assert choose(["a", "a.b", "d", "not.tried"], tried, failed, environ) == expected


def test_reasons_are_bounded() -> None:
    failed = {f"m{number}": "x" * 10_000 for number in range(2 * MAX_REASONS)}
    left_out = choose(list(failed), {}, failed, Surroundings()).left_out
    assert len(left_out) == MAX_REASONS and max(map(len, left_out.values())) <= 200
