"""A forked rank cannot be told from `python -u script.py`, nor can one that our bootstrap runs: a table of scripts."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.probes import PROBES, SEEDS, Probe
from tests.e2e.prologues import BEFORE_LEARNED, LEARNED_END, PROLOGUES, Prologue
from tests.patience import patient
from tests.program import clean_environment, run

STARTS = Path(__file__).with_name("starts.py")
LIMIT_S = 600
pytestmark = pytest.mark.timeout(patient(LIMIT_S + 60))
WAYS = ("exec", "forked")
PARTS = [PROBES[first::4] for first in range(4)]  # they run beside each other; `tests/conftest.py` keeps each together
ROWS = [pytest.param(number, probe, id=f"part {number} {probe}") for number, part in enumerate(PARTS) for probe in part]


def run_all(folder: Path, probes: list[Probe], *ways: str) -> list[dict[str, Any]]:
    """Per probe and way: exit code, stdout, stderr, files written."""
    runs = []
    for number, probe in enumerate(probes):
        place = folder / "scripts" / str(number)
        place.mkdir(parents=True)
        for name, text in {"probe.py": probe.source, **probe.files}.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text)
        runs.append({"words": probe.words, "environ": probe.environ})
    table = folder / "runs.json"
    table.write_text(json.dumps(runs))
    clean = clean_environment(OMP_NUM_THREADS="1", TMPDIR=str(folder))
    clean["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch 2.6 starts a worker, which complains when its folder goes
    run([sys.executable, STARTS, table, *ways], folder=folder, environ=clean, limit_s=LIMIT_S, check=True)
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any] | str]:
    """Part -> probe -> what it came to, or why there is nothing: all of a part is run once, by one zygote."""

    @functools.cache
    def run_part(number: int) -> dict[str, Any] | str:
        try:
            came = run_all(tmp_path_factory.mktemp("fidelity"), PARTS[number], "plain", *WAYS)
        except AssertionError as failed:
            return str(failed)
        return {probe.name: result for probe, result in zip(PARTS[number], came, strict=True)}

    return run_part


def alike(came: Any) -> Any:
    """Without what differs between any two runs: addresses, numbers of processes and threads, and what Python says of
    semaphores that its workers had not given up at their end."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", json.dumps(came))
    text = re.sub(r"/[^\s\"\\]*/resource_tracker\.py:\d+: UserWarning: .*?\\n  warnings\.warn\(.*?\)\\n", "", text)
    return json.loads(re.sub(r"(started (daemon )?|pid=)\d+", r"\1N", text))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("part", "probe"), ROWS)
def test_nothing_tells_how_it_was_started(
    found: Callable[[int], dict[str, Any] | str], part: int, probe: Probe, way: str
) -> None:
    all_came = found(part)
    assert isinstance(all_came, dict), all_came
    came = all_came[probe.name]
    assert alike(came[way]) == alike(came["plain"])


def test_ranks_have_seeds_of_their_own(tmp_path: Path) -> None:
    first, second = run_all(tmp_path, [Probe("one", SEEDS), Probe("two", SEEDS)], "forked")
    one, two = (came["forked"][1].split() for came in (first, second))
    assert first["forked"][0] == 0, first
    assert [word for word, other in zip(one, two, strict=True) if word == other] == ["True"]


# What remains different is listed in docs/warm_start.md: a key here is a line there.
DIFFERENT = {"modules of Python", "frozen by gc", "exit functions"}
"""Parts of the report before and after the import of torch."""
IN_EVERY_RANK = {"modules of Python", "exit functions"}
"""Also where the rank was started anew: it has one exit function of ours, which tells that its program is done."""
BEFORE = {"logger class"}
"""Those before it alone."""
LATER = {"tempfile"}
"""Those after a later import that was made before the fork."""
LINES = [
    pytest.param(prologue, id=str(prologue), marks=[pytest.mark.slow] if prologue.slow else [])
    for prologue in PROLOGUES
]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the prologues that were selected, what they came to: all by one zygote."""
    wanted = [item.callspec.params["prologue"] for item in request.session.items if "reports" in item.fixturenames]  # type: ignore[attr-defined]
    came = run_all(tmp_path_factory.mktemp("prologues"), [prologue.probe() for prologue in wanted], "plain", "forked")
    return {prologue.name: result for prologue, result in zip(wanted, came, strict=True)}


@pytest.mark.parametrize("prologue", LINES)
def test_a_script_sees_a_fresh_interpreter_before_and_after_it_imports_torch(
    reports: dict[str, Any], prologue: Prologue
) -> None:
    came = reports[prologue.name]
    assert prologue.again in came["said"] and bool(prologue.again) == bool(came["said"]), came
    (plain, text), (forked, other) = (report_of(came[way]) for way in ("plain", "forked"))
    assert other == text
    for phase in ("before", "after"):
        hidden = IN_EVERY_RANK if prologue.again else DIFFERENT | (BEFORE if phase == "before" else set())
        differing = {
            key: (plain[phase][key], forked[phase][key])
            for key in plain[phase].keys() - hidden
            if plain[phase][key] != forked[phase][key]
        }
        assert not differing, f"{phase} the import: {differing}"


def test_a_script_cannot_tell_that_modules_were_learned(tmp_path: Path) -> None:
    came = run_all(tmp_path, [prologue.probe(LEARNED_END) for prologue in BEFORE_LEARNED], "plain", "learned")
    for prologue, result in zip(BEFORE_LEARNED, came, strict=True):
        assert prologue.again in result["said"] and bool(prologue.again) == bool(result["said"]), result
        (plain, text), (learned, other) = (report_of(result[way]) for way in ("plain", "learned"))
        assert other == text, prologue
        for phase in ("before", "after", "later"):
            hidden = IN_EVERY_RANK if prologue.again else DIFFERENT | (LATER if phase == "later" else BEFORE)
            differing = {
                key: (plain[phase][key], learned[phase][key])
                for key in plain[phase].keys() - hidden
                if plain[phase][key] != learned[phase][key]
            }
            assert not differing, f"{prologue}, {phase}: {differing}"


def report_of(came: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The report that a script printed, and all else that it came to."""
    code, out, err, written = alike(came)
    lines = [line for line in out.splitlines() if not line.startswith("REPORT ")]
    (report,) = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("REPORT ")] or [{}]
    return report, [code, lines, err, written]
