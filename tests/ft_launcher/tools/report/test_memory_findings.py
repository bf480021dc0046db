"""What a report says of the training's state in memory."""

from __future__ import annotations

import pytest

from ft_launcher.tools.report import terminal_text
from ft_launcher.tools.report.job_findings import MemoryFindings
from ft_launcher.tools.report.page import as_html
from tests.ft_launcher.tools.report.lines import Line, begins, end, fault, found, line, start


def loaded(t: float, cycle: int, step: int = 0, lost: int = 0, refused: int = 0) -> Line:
    tier = "memory" if step else "none"
    others = [{"step": 99, "rank": 1, "reason": "damaged"}] * refused
    return line("memory_loaded", t, cycle=cycle, tier=tier, step=step, steps_lost=lost, refused=others)


def saved(t: float, cycle: int, saves: int = 5, share: float | None = 0.01) -> Line:
    facts = {"failed": 0, "cost_s": 0.5, "size": 2048, "share": share}
    return line("memory_saved", t, cycle=cycle, saves=saves, **facts)


NODE = [
    start(100),
    begins(101, 0),
    loaded(102, 0),
    saved(110, 0, share=0.02),
    fault(111, 0),
    begins(112, 1),
    loaded(113, 1, step=21, lost=24, refused=1),
    saved(120, 1),
    fault(121, 1),
    begins(122, 2),
    loaded(123, 2, step=79, lost=1),
    saved(130, 2),
    end(131),
]
OTHER_NODE = [
    start(100, "b"),
    begins(101, 0, node_rank=1),
    loaded(102, 0),
    saved(110, 0),
    begins(112, 1, node_rank=1),
    loaded(113, 1, step=21, lost=24, refused=1),
    saved(120, 1),
    begins(122, 2, node_rank=1),
    loaded(123, 2, step=79, lost=1),
    saved(130, 2),
    end(131),
]


def test_each_fault_knows_its_steps_and_nodes_do_not_add_up() -> None:
    findings = found(NODE, OTHER_NODE)
    assert [(one.steps_lost, one.tier) for one in findings.faults] == [(24, "memory"), (1, "memory")]
    assert findings.memory == MemoryFindings({"none": 1, "memory": 2}, 25, 1, 15, 0, 1.5, 0.02, 4096)


def test_a_fault_does_not_cost_what_later_restarts_in_process_did() -> None:
    findings = found([*NODE[:7], loaded(114, 1, step=30, lost=50), *NODE[7:]])
    assert [one.steps_lost for one in findings.faults] == [24, 1]
    assert findings.memory is not None and findings.memory.steps_lost == 75


def test_the_size_of_a_save_is_that_of_the_nodes_of_the_last_cycle() -> None:
    """The other node is gone after cycle 1. Then it is there again, with another launcher."""
    findings = found(NODE, OTHER_NODE[:7])
    assert findings.memory is not None and findings.memory.size == 2048
    back = [start(121, "c"), begins(122, 2, node_rank=1), loaded(123, 2, step=79, lost=1), saved(130, 2), end(131)]
    findings = found(NODE, OTHER_NODE[:7], back)
    assert findings.memory is not None and findings.memory.size == 4096


def test_a_node_that_has_not_told_its_saves_of_the_last_cycle_counts_by_those_before() -> None:
    findings = found(NODE[:11], OTHER_NODE)
    assert findings.memory is not None and findings.memory.size == 4096


def test_the_text_and_the_page_say_it() -> None:
    findings = found(NODE)
    lines = terminal_text.as_lines(findings, [])
    at = lines.index("State in memory")
    assert lines[at + 1 : at + 3] == [
        "  went on: 2 cycles from memory, 1 cycle from no state in memory; 25 steps lost; 1 generation not used",
        "  15 saves took 1.5 s, at most 2.0% of the time of a cycle beside its first save; the last has 2.0 KiB",
    ]
    assert "24 steps lost" in "".join(lines)
    page = as_html(findings, [])
    assert "<h2>State in memory</h2>" in page and "2 cycles from memory" in page


def test_a_fault_that_killed_the_launcher_is_told_by_the_next_attempt() -> None:
    first = [start(100), begins(101, 0), loaded(102, 0), saved(103, 0)]
    second = [start(200), begins(201, 0), loaded(202, 0, step=30, lost=3), saved(203, 0), end(204)]
    findings = found(first + second)
    (killed,) = findings.faults
    assert (killed.kind, killed.steps_lost) == ("attempt", 3)


def test_a_job_that_kept_no_state() -> None:
    findings = found([start(100), begins(101, 0), fault(102, 0), begins(103, 1), end(104)])
    assert findings.memory is None and findings.faults[0].steps_lost is None
    assert "State in memory" not in terminal_text.as_lines(findings, [])


@pytest.mark.parametrize("wrong", [{"cycle": "x"}, {"steps_lost": None}, {"refused": 7}, {"tier": 5}, {"step": []}])
def test_whatever_a_journal_holds_a_report_comes_out(wrong: Line) -> None:
    lines = [start(100), begins(101, 0), loaded(102, 0, 5, 2) | wrong, saved(103, 0) | wrong, end(104)]
    terminal_text.as_lines(found(lines), [])
