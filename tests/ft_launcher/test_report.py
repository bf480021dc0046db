"""The console block: at most ten lines, with what a person needs first."""

from dataclasses import replace
from pathlib import Path

from ft_launcher.attribution import Fault, FaultClass, FaultKind
from ft_launcher.report import block
from ft_launcher.restart_policy import Action, Decision

FAULT = Fault(
    FaultKind.HANG, 3, 1, 4711, -9, "hangs: section step open for 5.0 s", "in section step at iteration 9",
    "the process is stopped", detail=tuple(f"train.py:{n} in f{n}" for n in range(20)),
    others=tuple(f"rank {n} was running" for n in range(9)), fault_class=FaultClass.HANG,
)  # fmt: skip
RESTART = Decision(Action.RESTART, "restart 1 of 3", True, 2)


def test_says_everything_in_ten_lines() -> None:
    text = block(FAULT, RESTART, 2, "node7", Path("/logs/run"))
    assert len(text.splitlines()) == 10
    for part in (
        "rank 3 on node7 hangs",
        "iteration 9; class: hang",
        "stopped",
        "train.py:0",
        "restart 1 of 3, 2 left",
        "/logs/run",
    ):
        assert part in text


def test_giving_up_names_the_exit_code() -> None:
    text = block(replace(FAULT, detail=(), others=()), Decision(Action.GIVE_UP, "spent", exit_code=85), 0, "n", None)
    assert "give up - spent; exit code 85" in text


def test_a_wait_is_said() -> None:
    text = block(FAULT, replace(RESTART, wait_s=4.0), 2, "node7", None)
    assert "restart 1 of 3, 2 left, after a wait of 4 s" in text


def test_colour_only_when_asked() -> None:
    assert "\033" not in block(FAULT, RESTART, 0, "n", None)
    assert "\033" in block(FAULT, RESTART, 0, "n", None, colour=True)
