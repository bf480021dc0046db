"""`ft_launcher status` and `ft_launcher stacks`: what a job that runs on this host does, and where its ranks are.

`cli.py` runs both. `running_jobs.py` finds the job that is meant, and asks it.

Whatever an answer holds was written by a launcher, but words in it come from ranks: lines are printed with control
characters escaped (`printable`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import click

from ft_launcher.record.console.console_text import answer, printable
from ft_launcher.tools.commands.running_jobs import ALL_NODES_S, NOBODY, SILENT, NoAnswerError, running_job
from ft_launcher.tools.status.memory_status import line_of
from ft_launcher.tools.status.summary import JobState, RankState
from rank_monitor.contract.rounds.barrier import ranges_of

UNWELL = 3
"""The exit code of `status` where a job hangs, stalls or restarts."""
# States of a job, and of ranks, as `/status.json` has them.
_UNWELL = {JobState.TROUBLED.value, JobState.STALLED.value, JobState.RESTARTING.value}
_WATCHED = {RankState.TRAINING.value, RankState.STALLED.value, RankState.HUNG.value}
_MAX_NAMED = 16
"""Nodes that a line names at most."""
RUN = click.argument("run", required=False, metavar="[RUN]")
"""The argument of all commands that mean a running job."""
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Prints the answer as JSON.")


@click.command(
    help="Says in a few lines what a job on this host does. RUN is its name or run id, or a beginning; none is needed "
    "where one job runs. Exits with 0 if it runs, 3 if it hangs, stalls or restarts, 4 if there is none, 5 if its "
    "launcher does not answer."
)
@RUN
@_AS_JSON
def status(run: str | None, as_json: bool) -> None:
    """Prints the status to stdout.

    Raises:
        UsageError: several jobs run here, and RUN does not tell them apart.
        SystemExit: with 3 where the job is not well, with 4 where there is none, with 5 where its launcher does not
            answer.
    """
    job = running_job(run)
    if as_json:
        print(json.dumps(job.status, indent=1))
    else:
        for line in as_lines(job.status):
            print(printable(line))
    if job.status.get("state") in _UNWELL:
        sys.exit(UNWELL)


@click.command(
    help="Prints where each rank on this host is, ranks at the same place together, and how far it is in each process "
    "group. RUN is the job's name or run id, or a beginning; none is needed where one job runs. The ranks go on."
)
@RUN
@click.option("--all-nodes", is_flag=True, help="Asks the other nodes of the job, too; names those that do not answer.")
@_AS_JSON
def stacks(run: str | None, all_nodes: bool, as_json: bool) -> None:
    """Prints stacks to stdout, the smallest group of ranks first.

    Raises:
        UsageError: several jobs run here, and RUN does not tell them apart.
        SystemExit: with 4 where there is no such job, or no rank of it runs; with 5 where its launcher does not answer.
    """
    job = running_job(run)
    try:
        if all_nodes:
            found = job.ask("/stacks?all=1", ALL_NODES_S)
        else:
            found = job.ask("/stacks")
    except NoAnswerError as error:
        answer(str(error))
        sys.exit(SILENT)
    except OSError as error:
        answer(str(error))
        sys.exit(NOBODY)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for group in found.get("groups", []):
        for line in stack_lines(group):
            print(printable(line))
    for line in collective_lines(found.get("collectives")):
        print(printable(line))
    for line in missing_lines(found):
        print(printable(line), file=sys.stderr)


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns the status in lines: the job, its ranks, its faults, and its state in memory where it keeps any. `found`
    is the object of `/status.json`."""
    where = f"{found['job_name']} on {found['node']}"
    if found["nodes"] > 1:
        where += f" (node {found['node_rank']} of {found['nodes']})"
    lines = [f"{where}: {found['sentence']}", _ranks_line(found["ranks"]), _faults_line(found)]
    if found.get("memory"):
        lines.append(line_of(found["memory"]))
    return lines


def stack_lines(group: Mapping[str, Any]) -> Iterator[str]:
    """Yields a group of ranks at the same location in lines. `group` is an item of `groups` in an answer to `/stacks`.

    Ranks without a stack form a group as well, with the reason.
    """
    ranks = group["ranks"]
    yield f"rank{'s' if len(ranks) > 1 else ''} {ranges_of(ranks)}:"
    frames = group["frames"]
    if not frames:
        reason = str(group["process"].get("stacks") or "it did not answer")
        yield f"  no stacks: {reason.removeprefix('none: ')}"
    yield from (f"  {frame}" for frame in frames)


def collective_lines(table: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields how far ranks are in their process groups, in lines. `table` is `collectives` of an answer to `/stacks`.

    Collectives of a group are counted from 1. A row has the ranks that are equally far, so the row with the lowest
    number shows who holds up the others.
    """
    if not table or not table["rows"]:
        return
    yield "collectives by process group:"
    for row in table["rows"]:
        ranks, entered, finished = row["ranks"], row["entered"], row["finished"]
        operation = row["operation"] or "collective"
        text = f"  {row['group']}: rank{'s' if len(ranks) > 1 else ''} {ranges_of(ranks)}"
        if entered <= finished:
            yield f"{text} finished {operation} {finished}"
            continue
        text += f" in {operation} {finished + 1}"
        if row["shape"]:
            text += f" of {row['shape']}"
        if entered > finished + 1:
            text += f", entered up to {entered}"
        if row["started"]:
            text += f", started up to {row['started']}"
        yield text
    for row in table["silent"]:
        yield f"  rank{'s' if len(row['ranks']) > 1 else ''} {ranges_of(row['ranks'])}: {row['why']}"


def missing_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields which nodes are missing in an answer about all nodes, in lines. `found` is an answer to
    `/stacks?all=1`."""
    silent = found.get("silent", [])
    if silent:
        named = ", ".join(f"{node['node']} (node {node['node_rank']})" for node in silent[:_MAX_NAMED])
        more = len(silent) - _MAX_NAMED
        yield f"ft_launcher: no answer in time from {named}{f' and {more} more' if more > 0 else ''}"
    if found.get("problem"):
        yield f"ft_launcher: the ranks of this node only: {found['problem']}"


def _ranks_line(ranks: list[dict[str, Any]]) -> str:
    """Returns the line about the ranks of this host: how many are in which state, and which is silent for longest."""
    if not ranks:
        return "no rank has run yet"
    counts = Counter(rank["state"] for rank in ranks)
    parts = [f"{count} {state}" for state, count in counts.most_common()]
    text = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} here: {', '.join(parts)}"
    watched = [rank for rank in ranks if rank["state"] in _WATCHED]
    silent = max(watched, key=lambda rank: rank["sign_age_s"] or 0.0, default=None)
    if silent is not None and silent["sign_age_s"] is not None:
        text += f"; the most silent is rank {silent['rank']}, for {silent['sign_age_s']:.1f} s"
        sections = ", ".join(f"{name} {age_s:.1f} s" for name, age_s in silent["sections"].items())
        if sections:
            text += f" (in {sections})"
    return text


def _faults_line(found: Mapping[str, Any]) -> str:
    """Returns the line about faults and the restarts that are left."""
    count = found["restarts_left"]
    left = f"{count} restart{'' if count == 1 else 's'} left"
    if not found["faults"]:
        return f"no fault so far; {left}"
    last = found["faults"][-1]
    lost = ""
    if last.get("steps_lost") is not None:
        lost = f", {last['steps_lost']:,} step{'' if last['steps_lost'] == 1 else 's'} lost"
    return f"last fault: rank {last['rank']} {last['what']} in cycle {last['cycle']}{lost}; {left}"
