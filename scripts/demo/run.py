"""The demo: trains three times under the launcher and shows that the result is the same: without faults, with faults
and checkpoints on disk alone, and with the same faults and the state in memory too.

Prints what the launcher saw and did (from its journal), the accuracy on held-out images, whether the weights of all
runs are equal bit for bit, and, as `ft_launcher report` finds it, what each fault cost, and how many steps. The exit
code is 0 only if everything that it claims holds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import FAULTS

from ft_launcher.record.journal_reader import Problems, read_journals
from ft_launcher.tools.report import terminal_text
from ft_launcher.tools.report.advice import advise
from ft_launcher.tools.report.collection import Collection
from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.job_findings import JobFindings
from ft_launcher.tools.report.page import as_html

HERE = Path(__file__).resolve().parent
WANTED_ACCURACY = 0.95
LIMIT_S = 300.0
GRACE_S = 30.0
ON_DISK, IN_MEMORY = "--ft-memory-interval=none", "--ft-memory-interval=1"
"""Where a training keeps its state: in its checkpoints alone, or after each step in memory too."""


@dataclass(frozen=True)
class Training:
    """One run of the training: how it ended, what it cost, what it wrote, what the launcher noted."""

    out: Path
    exit_code: int
    seconds: float
    result: dict[str, Any]
    journal: list[dict[str, Any]]
    findings: JobFindings | None

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def count(self, event: str) -> int:
        return sum(record["event"] == event for record in self.journal)


def train(script: str, out: Path, epochs: int, state: str) -> Training:
    """Runs `script` to its end under the launcher; all that both write goes below `out`, which is made anew. `state`:
    an option of the launcher."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "ft_launcher", "--standalone", "--nproc-per-node=2", "--max-restarts=5"),
        *("--ft-rank-section-timeouts=setup:60,step:5,checkpointing:30", f"--log-dir={out / 'logs'}", state),
        *(str(HERE / script), f"--out={out}", f"--epochs={epochs}"),
    ]
    started = time.monotonic()
    with (out / "console.log").open("wb") as console:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT)
        try:
            exit_code = process.wait(LIMIT_S)
        except BaseException:
            process.terminate()
            process.wait(GRACE_S)
            raise
    seconds = time.monotonic() - started
    result = out / "result.json"
    lines = [line for file in sorted(out.glob("logs/**/journal.*.jsonl")) for line in file.read_text().splitlines()]
    return Training(
        out=out,
        exit_code=exit_code,
        seconds=seconds,
        result=json.loads(result.read_text()) if result.exists() else {},
        journal=[json.loads(line) for line in lines],
        findings=findings_of(out / "logs"),
    )


def findings_of(logs: Path) -> JobFindings | None:
    """What `ft_launcher report` finds in the journals of a folder; None: there are none."""
    collection = Collection()
    for entry in read_journals([logs], Problems()):
        collection.add(entry)
    return find(collection)


def print_timeline(journal: list[dict[str, Any]]) -> None:
    """One line per event that matters: seconds since the first, what it is, and its words."""
    for record in journal:
        words = {
            "cycle_start": lambda r: f"cycle {r['cycle']}: {len(r['ranks'])} ranks started",
            "verdict": lambda r: f"rank {r['rank']}: {r['reason']}",
            "fault": lambda r: f"rank {r['rank']} {r['what']} {r['where']}; {r['hint']}".rstrip("; "),
            "decision": lambda r: f"{r['action']}: {r['reason']}",
            "memory_loaded": lambda r: f"from step {max(r['step'], r['newer_than'])}, {r['steps_lost']} steps lost",
            "job_end": lambda r: r["reason"],
        }.get(record["event"])
        if words is not None:
            print(f"  {record['t'] - journal[0]['t']:6.2f} s  {record['event']:<13}  {words(record)}")


def steps_lost(run: Training) -> list[int]:
    """How many steps each fault of a training has cost, as far as the report knows."""
    if run.findings is None:
        return []
    return [fault.steps_lost for fault in run.findings.faults if fault.steps_lost is not None]


def print_report(runs: dict[str, Training]) -> None:
    """The goodput of all runs, what each fault cost by phase, and where the whole report is."""
    print("\nWhat the time went to (docs/operations.md):")
    for name, run in runs.items():
        if run.findings is not None:
            print(f"  goodput {name}: {run.findings.goodput:.1%} of {run.findings.wall_s:.1f} s")
    for name, run in list(runs.items())[1:]:
        if run.findings is None:
            continue
        print(f"  {name}:")
        for fault in run.findings.faults:
            print(f"  {terminal_text.headline(fault)}\n    {terminal_text.costs(fault)}")
        page = run.out / "report.html"
        page.write_text(as_html(run.findings, advise(run.findings)), encoding="utf-8", errors="backslashreplace")
        print(f"  The whole report: {page}\n  (ft_launcher report {run.logs} -o report.html)")


def claims(plain: Training, on_disk: Training, in_memory: Training) -> list[tuple[bool, str]]:
    """What the demo says in the end: whether it holds, and the words."""
    runs, faulty = (plain, on_disk, in_memory), (on_disk, in_memory)
    codes = [run.exit_code for run in runs]
    injected = [sum((run.out / f"fault.{fault.name}").exists() for fault in FAULTS) for run in faulty]
    named = [run.count("fault") for run in runs]
    costs = [fault.cost_s for run in faulty if run.findings is not None for fault in run.findings.faults]
    accuracies = [run.result.get("test_accuracy", 0.0) for run in runs]
    digests = [run.result.get("weights_sha256", "") for run in runs]
    lost = [steps_lost(run) for run in faulty]
    return [
        (codes == [0, 0, 0], f"all trainings came to their end: exit codes {codes}"),
        (injected == [len(FAULTS)] * 2, f"{injected} of {len(FAULTS)} faults injected"),
        (named == [0, *[len(FAULTS)] * 2], f"the launcher named every fault and nothing else: {named}"),
        (
            len(costs) == 2 * len(FAULTS) and min(costs) > 0,
            f"the report says what each fault cost: {[f'{cost_s:.1f} s' for cost_s in costs]}",
        ),
        (
            [len(found) for found in lost] == [len(FAULTS)] * 2 and sum(lost[1]) < sum(lost[0]),
            f"steps lost by the faults: {lost[0]} without, {lost[1]} with the state in memory",
        ),
        (
            min(accuracies) >= WANTED_ACCURACY,
            f"accuracy on held-out images is at least {WANTED_ACCURACY}: {accuracies}",
        ),
        (
            len(set(digests)) == 1 and digests[0] != "",
            f"the weights are the same, bit for bit: {[text[:16] for text in digests]}",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="where everything is written")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    out = args.out.absolute()

    print("Training without faults ...", flush=True)
    plain = train("train.py", out / "without_faults", args.epochs, ON_DISK)
    print(f"  {plain.seconds:.1f} s")
    print(f"Training with faults: {', '.join(fault.name for fault in FAULTS)} ...", flush=True)
    on_disk = train("faults.py", out / "with_faults", args.epochs, ON_DISK)
    print(f"  {on_disk.seconds:.1f} s; what the launcher saw and did:")
    print_timeline(on_disk.journal)
    print("Training with the same faults, and the state in memory ...", flush=True)
    in_memory = train("faults.py", out / "in_memory", args.epochs, IN_MEMORY)
    print(f"  {in_memory.seconds:.1f} s; what the launcher saw and did:")
    print_timeline(in_memory.journal)

    results = claims(plain, on_disk, in_memory)
    print("\n[without faults, with faults, with faults and the state in memory]")
    for holds, words in results:
        print(f"  {'ok  ' if holds else 'FAIL'}  {words}")
    failed = not all(holds for holds, _ in results)
    if failed:
        for run in (plain, on_disk, in_memory):
            print(f"\nThe end of {run.out / 'console.log'}:")
            print("\n".join((run.out / "console.log").read_text(errors="replace").splitlines()[-30:]))
    print_report({"without faults": plain, "with faults": on_disk, "with faults and state in memory": in_memory})
    print(f"\nEverything that was written lies in {args.out}.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
