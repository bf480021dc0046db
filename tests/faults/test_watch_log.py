"""Trainings that know nothing of us and are read by what they print (`--ft-watch-log`): real jobs."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests.faults.conftest import StartJob
from tests.faults.job import Job, kill
from tests.faults.test_attribution import script
from tests.faults.test_status import status
from tests.faults.training import Plan
from tests.program import ROOT, clean_environment, run

STEPS, RESUMED, FAULT_AT = 14, 6, 9

TRAINING = f"""
import os, sys, time

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for step in range({RESUMED} if again else 0, {STEPS}):
    time.sleep(0.05)
    if os.environ["RANK"] == "0":
        is_faulty = step == {FAULT_AT} and (not again or HOW == "always nan")
        loss = "nan" if is_faulty and "nan" in HOW else 1.5
        sys.stdout.write(f"iter {{step}}: loss {{loss}}, time 50.00ms, mfu 1.00%\\n")
        if is_faulty and HOW in ("hangs", "nan, and hangs", "always nan"):
            time.sleep(600)
        if is_faulty and HOW == "dies":
            os._exit(3)
    else:
        sys.stderr.write(f"rank 1 at {{step}}\\n")
"""
"""nanoGPT's lines, from rank 0 only; after a restart it goes on at a step before the one with the fault."""


def start(start_job: StartJob, folder: Path, how: str, *flags: str) -> Job:
    text = TRAINING.replace("HOW", repr(how))
    return start_job(Plan(), 2, "--max-restarts=2", *flags, script=script(folder, text))


def printed(job: Job) -> list[str]:
    """The lines of rank 0 on the console."""
    return re.findall(r"^iter \d+: .*$", job.output, re.MULTILINE)


def expected(*steps: int) -> list[str]:
    return [f"iter {step}: loss 1.5, time 50.00ms, mfu 1.00%" for step in steps]


@pytest.mark.parametrize(("limit", "state"), [("600", "stalled"), ("none", "unwatched")])
def test_a_rank_that_the_limit_watches_is_not_unwatched(
    start_job: StartJob, tmp_path: Path, limit: str, state: str
) -> None:
    """Rank 0 prints steps, and then none."""
    job = start(start_job, tmp_path, "hangs", "--ft-watch-log=nanogpt", f"--ft-watch-log-timeout={limit}")
    job.until(lambda: len(printed(job)) > FAULT_AT, "the last step")
    job.until(lambda: status(job)["state"] == "stalled", "the stall")
    assert status(job)["ranks"][0]["state"] == state
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == ExitCode.PREEMPTED, job.tail()


@pytest.mark.parametrize("warm", ["auto", "off"])
def test_progress_reaches_policy_ledger_and_console(start_job: StartJob, tmp_path: Path, warm: str) -> None:
    """What the ranks print arrives on the console as it is and in order, without a prefix."""
    flags = ("--ft-watch-log=nanogpt", f"--ft-warm-start={warm}")
    job = start(start_job, tmp_path, "dies", *flags)
    assert job.finish() == 0, job.tail()
    assert printed(job) == expected(*range(FAULT_AT + 1), *range(RESUMED, STEPS)), job.tail()
    assert re.findall(r"^rank 1 at (\d+)$", job.output, re.MULTILINE)[-1] == str(STEPS - 1)
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["iteration"]) == (0, FAULT_AT), job.tail()
    (failed,) = [line for line in job.journal("cycle_end") if line["how"] == "failed"]
    assert failed["iteration"] == FAULT_AT
    first, second, *_ = [part for part in job.journal("ledger") if part["has_ended"]]
    assert (first["resumed"], first["iteration"], first["steps"]) == (0, FAULT_AT, FAULT_AT), job.tail()
    assert (second["resumed"], second["iteration"]) == (RESUMED, STEPS - 1)
    (end,) = job.journal("job_end")
    assert end["seconds"]["step"] > 0 and end["seconds"]["lost_progress"] > 0 and end["goodput"] > 0


def test_no_new_step_is_a_verdict_with_stacks(start_job: StartJob, tmp_path: Path) -> None:
    given = f"--ft-cfg-path={ROOT / 'configs' / 'printed_steps.yaml'}"
    job = start(start_job, tmp_path, "hangs", given, "--ft-watch-log-timeout=4")
    assert job.finish() == 0, job.tail()
    (verdict,) = job.journal("verdict")
    assert (verdict["rank"], verdict["limit"], verdict["limit_s"]) == (0, "log", 4.0)
    assert (verdict["iteration"], verdict["condemned"]) == (FAULT_AT, True)
    assert "time.sleep(600)" in (tmp_path / "train.py").read_text().splitlines()[_line(verdict["frames"][0]) - 1]
    assert Path(verdict["stacks"]).read_text()
    assert "printed no new step for" in job.output and "(watch_log_timeout)" in job.output
    assert printed(job)[-1:] == expected(STEPS - 1)
    first, second = job.journal("printed_steps")
    assert (first["rank"], first["durations"]["printed step"]["count"]) == (0, FAULT_AT), job.tail()
    assert second["durations"]["printed step"]["count"] == STEPS - RESUMED - 1
    assert said_in_report(job) == ["printed step", str(FAULT_AT + STEPS - RESUMED - 1), "4.0 s, fired in 1 cycle"]


def said_in_report(job: Job) -> list[str]:
    """The name, the number and the limit of what was printed."""
    ended = run([sys.executable, "-m", "ft_launcher", "report", str(job.journal_folder)], limit_s=60)
    (found,) = re.findall(
        r"^  (printed step): (\d+) times, .*limit ([\d.]+ s, fired in 1 cycle)", ended.stdout, re.MULTILINE
    )
    return list(found)


def _line(frame: str) -> int:
    """The number of the line in `train.py:17 in <module>`."""
    return int(frame.partition(":")[2].split()[0])


@pytest.mark.parametrize("how", ["warn", "fault", "off"])
def test_a_loss_that_is_no_number(start_job: StartJob, tmp_path: Path, how: str) -> None:
    job = start(
        start_job,
        tmp_path,
        "nan, and hangs" if how == "fault" else "nan",
        "--ft-watch-log=nanogpt",
        f"--ft-watch-log-nan={how}",
    )
    assert job.finish() == 0, job.tail()
    found = [(event["rank"], event["iteration"], event["loss"], event["fault"]) for event in job.journal("nan_loss")]
    faults = [(fault["kind"], fault["error"]) for fault in job.journal("fault")]
    assert found == ([] if how == "off" else [(0, FAULT_AT, "nan", how == "fault")]), job.tail()
    assert faults == ([("exception", "loss is not finite")] if how == "fault" else []), job.tail()
    assert ("the training goes on" in job.output) == (how == "warn")


def test_the_same_nan_again_and_again_ends_the_job(start_job: StartJob, tmp_path: Path) -> None:
    job = start(
        start_job, tmp_path, "always nan", "--ft-watch-log=nanogpt", "--ft-watch-log-nan=fault", "--max-restarts=5"
    )
    assert job.finish(120) == 93, job.tail()
    assert [fault["iteration"] for fault in job.journal("fault")] == [FAULT_AT] * 3
    assert "the same error 3 times in a row: loss is not finite at iteration 9" in job.output


FUNCTION = """
import os, signal, sys
from ft_launcher import LaunchConfig, launch

def train():
    for step in range(5):
        print("step", step)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    try:
        launch(train, LaunchConfig(nproc_per_node=1, start_method=sys.argv[1], max_restarts=0,
            watch_log=r"step (?P<iteration>\\d+)", journal_dir=sys.argv[2]))()
    except Exception as error:
        print("ended by", type(error).__name__)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_function_prints_line_by_line(tmp_path: Path, method: str) -> None:
    """What it printed right before its death is read, also where Python would hold 8 KiB back for a file."""
    program = script(tmp_path, FUNCTION)
    words = [sys.executable, str(program), method, str(tmp_path / "journal")]
    ended = run(words, folder=tmp_path, environ=clean_environment(TMPDIR=str(tmp_path)), check=True)
    assert re.findall(r"^step (\d)$", ended.stdout, re.MULTILINE) == list("01234"), ended
    (file,) = (tmp_path / "journal").glob("journal.*.jsonl")
    (fault,) = [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "fault"]
    assert fault["iteration"] == 4


PROGRAM = """
import os, time
for step in range(STEPS):
    print("step", step, "loss", 0.5, "took", 0.05)
    time.sleep(0.05)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
""".replace("STEPS", str(STEPS))


def test_a_program_with_an_expression(start_job: StartJob, tmp_path: Path) -> None:
    """Python would hold its lines back in a file: the launcher sets PYTHONUNBUFFERED for programs."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    pattern = r"^step (?P<iteration>\d+) loss (?P<loss>\S+) took (?P<step_time>\S+)"
    flags = ("--no-python", "--max-restarts=1", f"--ft-watch-log={pattern}", "--ft-watch-log-timeout=4")
    job = start_job(Plan(), 1, *flags, script=program)
    assert job.finish() == 0, job.tail()
    (verdict,) = job.journal("verdict")
    assert (verdict["limit"], verdict["iteration"]) == ("log", STEPS - 1), job.tail()
    assert job.output.count(f"step {STEPS - 1} loss") == 2
    first, *_ = job.journal("ledger")
    assert first["durations"]["step"]["max_s"] == pytest.approx(0.05)


BARS = """
import sys, time
from tqdm import tqdm
for epoch in range(2):
    for step in tqdm(range(30), desc=f"epoch {epoch}", mininterval=0, file=sys.stderr):
        time.sleep(0.02)
    time.sleep(3)
"""


def test_bars_rest_between_epochs(start_job: StartJob, tmp_path: Path) -> None:
    """The validation after an epoch takes longer than the limit, and is no hang."""
    flags = ("--ft-watch-log=tqdm", "--ft-watch-log-timeout=2")
    job = start_job(Plan(), 1, *flags, script=script(tmp_path, BARS))
    assert job.finish() == 0, job.tail()
    assert job.journal("verdict", "fault") == []
    part, *_ = job.journal("ledger")
    assert part["steps"] >= 40 and part["iteration"] is None and part["resumed"] is None, job.tail()
    assert "epoch 1: 100%" in job.output and "[default0]" not in job.output


LONG = """
import sys, time
from pathlib import Path

folder = Path(sys.argv[-1])
step = 0
while not (folder / "go").exists():
    step += 1
    sys.stdout.write(f"step {step} loss 1.5\\n")
    (folder / "step").write_text(f"{step}\\n")
    time.sleep(0.01)
"""


def test_a_launcher_that_stands_still_judges_no_rank(start_job: StartJob, tmp_path: Path) -> None:
    """It is stopped for longer than the limit; when it goes on, it reads before it judges."""
    pattern = r"--ft-watch-log=^step (?P<iteration>\d+)"
    job = start_job(Plan(), 1, pattern, "--ft-watch-log-timeout=2", script=script(tmp_path, LONG))
    file = tmp_path / "step"

    def came_to(step: int) -> bool:
        text = file.read_text() if file.exists() else ""
        return text.endswith("\n") and int(text) >= step

    job.until(lambda: came_to(50), "steps")
    kill(job.process.pid, signal.SIGSTOP)
    try:
        # 0.01 s each, at least: longer than the limit.
        job.until(lambda: came_to(350), "steps that are printed while the launcher is stopped")
    finally:
        kill(job.process.pid, signal.SIGCONT)
    job.until(lambda: "step 351 " in job.output, "lines that were printed meanwhile")
    job.go()
    assert job.finish() == 0, job.tail()
    assert job.journal("verdict", "fault") == []


def test_teed_and_redirected_output_is_read_too(start_job: StartJob, tmp_path: Path) -> None:
    """A rank that prints to a file of the user's is read there, and its lines keep their prefix on the console."""
    flags = ("--ft-watch-log=nanogpt", "--redirects=0:3", "--tee=1:3", f"--log-dir={tmp_path / 'logs'}")
    job = start(start_job, tmp_path, "", *flags)
    assert job.finish() == 0, job.tail()
    part, *_ = job.journal("ledger")
    assert part["iteration"] == STEPS - 1
    assert printed(job) == [] and "[default1]:rank 1 at 0" in job.output
    (file,) = (tmp_path / "logs").glob("*/cycle_0/0/stdout.log")
    assert file.read_text().splitlines() == expected(*range(STEPS))


STUBBORN = """
import os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[-1])
if os.environ["RANK"] == "0":
    while not (folder / "ready").exists():
        time.sleep(0.01)
    os._exit(3)

def flood(number, frame):
    for _ in range(24):
        os.write(1, b"x" * (2 << 20))
    while os.fstat(1).st_blocks * 512 > 17 << 20:
        time.sleep(0.01)
    (folder / "bounded").touch()
    os._exit(0)

signal.signal(signal.SIGTERM, flood)
(folder / "ready").touch()
while True:
    signal.pause()
"""


def test_what_a_rank_prints_while_it_is_stopped_is_bounded(start_job: StartJob, tmp_path: Path) -> None:
    """Its stream is not shown, so nobody reads it between the end of the cycle and its own."""
    flags = ("--ft-watch-log=nanogpt", "--local-ranks-filter=0", "--max-restarts=0", "--workers-stop-timeout=60")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, STUBBORN))
    assert job.finish(120) == 3, job.tail()
    assert (tmp_path / "bounded").exists(), job.tail()


def test_no_step_at_all_is_said(start_job: StartJob, tmp_path: Path) -> None:
    job = start(start_job, tmp_path, "", "--ft-watch-log=megatron")
    assert job.finish() == 0, job.tail()
    assert "--ft-watch-log megatron has found no step in what the ranks print, so it protects nothing" in job.output
    assert "rank 0 printed 'iter 0: loss 1.5, time 50.00ms, mfu 1.00%', in which --ft-watch-log nanogpt" in job.output
