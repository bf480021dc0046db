"""The texts of a verdict: what was missed when a deadline passed. Pure.

`watch.py` makes the deadlines; `hang_detector.py` calls it with one of them and the time. It reads neither a clock nor
the state of a watch.
"""

from __future__ import annotations

from dataclasses import dataclass

SECTION = "section:"
SOFT, HARD = "soft_timeout", "hard_timeout"
LOG = "log"
"""The limit of what a rank prints."""
NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Deadline:
    """A moment (monotonic ns) by which something must have happened.

    `limit` is the name of the limit as `Verdict` has it; `section` the name of the open section it judges, which may
    be judged by another one's limit (warm-up); `sign` what an in-process wrapper is to show.
    """

    limit: str
    limit_s: float
    since_ns: int
    at_ns: int
    learned: bool = False
    section: str = ""
    sign: str = ""


# limit: (the line, what was missed, the setting). The lines about heartbeats and sections are worded as NVIDIA's
# monitor words them: people search their logs for these.
_TEXTS = {
    "initial": (
        "Did not get initial heartbeat. Waited {waited:.2f} seconds.",
        "no sign of life for {waited:.2f} s after init_workload_monitoring()",
        "initial_rank_heartbeat_timeout",
    ),
    "subsequent": (
        "Did not get subsequent heartbeat. Waited {waited:.2f} seconds.",
        "no sign of life for {waited:.2f} s",
        "rank_heartbeat_timeout",
    ),
    SECTION: (
        "Section '{section}' has been open for {waited:.2f} seconds. Timeout is {limit:.2f} seconds.",
        "section {section!r} open for {waited:.2f} s",
        "rank_section_timeouts",
    ),
    "out_of_section": (
        "Was out of section for {waited:.2f} seconds. Timeout is {limit:.2f} seconds.",
        "no section open for {waited:.2f} s",
        "rank_out_of_section_timeout",
    ),
    "connect": (
        "Did not get init_workload_monitoring(). Waited {waited:.2f} seconds.",
        "no init_workload_monitoring() for {waited:.2f} s after the start",
        "connect_timeout",
    ),
    "reconnect": (
        "Connection was lost. Waited {waited:.2f} seconds.",
        "its connection was lost and did not come back for {waited:.2f} s",
        "connect_timeout, or the largest limit in force",
    ),
    "teardown": (
        "Did not exit after shutdown_workload_monitoring(). Waited {waited:.2f} seconds.",
        "still there {waited:.2f} s after shutdown_workload_monitoring()",
        "teardown_timeout",
    ),
    LOG: (
        "No new step in the log. Waited {waited:.2f} seconds.",
        "printed no new step for {waited:.2f} s",
        "watch_log_timeout",
    ),
    SOFT: (
        "Soft timeout: no {sign}. Waited {waited:.2f} seconds.",
        "no {sign} for {waited:.2f} s",
        SOFT,
    ),
    HARD: (
        "Hard timeout: no {sign}. Waited {waited:.2f} seconds.",
        "no {sign} for {waited:.2f} s",
        HARD,
    ),
    "stall": (
        "Main thread made no progress. Waited {waited:.2f} seconds.",
        "its main thread ran no Python for {waited:.2f} s: it waits, or is inside one long call",
        "stall_warning",
    ),
}


def waited_s(deadline: Deadline, now_ns: int) -> float:
    """Seconds since what the deadline counts from."""
    return (now_ns - deadline.since_ns) / NS_PER_S


def line(deadline: Deadline, now_ns: int) -> str:
    """The one-line form for the log, worded so that searches for NVIDIA's lines find it."""
    template, _, _ = _texts(deadline)
    waited = waited_s(deadline, now_ns)
    return template.format(waited=waited, limit=deadline.limit_s, section=deadline.section, sign=deadline.sign)


def reason(deadline: Deadline, now_ns: int) -> str:
    """What was missed, for how long, by which limit and setting, and by how much."""
    _, missed, setting = _texts(deadline)
    what = missed.format(waited=waited_s(deadline, now_ns), section=deadline.section, sign=deadline.sign)
    if deadline.learned:
        origin = "learned"
    else:
        origin = setting
    if deadline.limit.startswith(SECTION) and deadline.limit != SECTION + deadline.section:
        origin += f", of {deadline.limit.removeprefix(SECTION)!r}"
    late_s = (now_ns - deadline.at_ns) / NS_PER_S
    return f"{what}; the limit is {deadline.limit_s:g} s ({origin}), exceeded by {late_s:.3f} s"


def _texts(deadline: Deadline) -> tuple[str, str, str]:
    if deadline.limit.startswith(SECTION):
        return _TEXTS[SECTION]
    return _TEXTS[deadline.limit]
