"""The callbacks in the real Lightning with one rank: what the monitor hears, how fits end, and what users get wrong."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.program import python, run

pl: Any = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

import torch  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, Timer  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402
from lightning.pytorch.utilities.exceptions import _TunerExitException  # noqa: E402

from ft_client import WorkloadAction, WorkloadControlRequest  # noqa: E402
from ft_client.integrations.lightning import (  # noqa: E402
    FaultToleranceCallback,
    FaultToleranceSectionsCallback,
    SimulatedFaultParams,
    StragglerDetectionCallback,
)
from ft_client.integrations.lightning.framework import choose  # noqa: E402
from rank_monitor.contract import env  # noqa: E402
from rank_monitor.contract.wire.messages import (  # noqa: E402
    ControlRequest,
    Detach,
    Heartbeat,
    IterationReached,
    LimitsSet,
    Sections,
)
from tests.client.fake_monitor import FakeMonitor  # noqa: E402
from tests.client.integrations.lightning_alone import BATCHES, Job, Model, model_class  # noqa: E402
from tests.patience import until  # noqa: E402

SHORT = timedelta(milliseconds=300)
BOTH = pytest.mark.parametrize("kind", [FaultToleranceCallback, FaultToleranceSectionsCallback])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(tmp_path)
    monkeypatch.setenv(env.FINISHED_FLAG_FILE, str(job.flag))
    return job


def heard_sections(monitor: FakeMonitor) -> list[str]:
    """The sections that were open, one after the other; `-` for none."""
    until(lambda: monitor.messages(Detach), "the end of the watch")
    names = ["+".join(name for name, _ in message.open) or "-" for message in monitor.messages(Sections)]
    return [name for name, _ in groupby(names)]


def test_sections_as_lightning_goes_through_them(job: Job, monitor: FakeMonitor) -> None:
    job.fit(FaultToleranceSectionsCallback(True, False), max_steps=5, limit_val_batches=1, num_sanity_val_steps=1)
    step, save = ["step", "-"], ["checkpointing", "-"]
    # A check of the validation before the training; after step 4 the best and the last; the wait for what is not saved.
    assert heard_sections(monitor) == ["setup", "-", *step, *step * 4, *save * 2, *step, *save]
    assert [one.iteration for one in monitor.messages(IterationReached)] == [0, 1, 2, 3, 4, 5]


def test_first_evaluation_steps_are_not_judged_by_what_was_learned(job: Job, monitor: FakeMonitor) -> None:
    watch = FaultToleranceSectionsCallback(True, True, exp_dir=job.folder)
    job.fit(watch, max_steps=20)
    assert job.learned() == ["checkpointing", "step"]
    monitor.received.clear()
    job.fit(watch, max_steps=40)
    assert job.learned() == ["checkpointing", "setup", "step", "out_of_section"]
    heard = heard_sections(monitor)
    assert heard[0] == "setup" and heard.count("warmup") == 3 and heard.count("step") == 20
    assert monitor.messages(LimitsSet)[0].learned == ["section:checkpointing", "section:step"]


def test_heartbeats_and_what_they_teach(job: Job, monitor: FakeMonitor) -> None:
    watch = FaultToleranceCallback(True, True, exp_dir=job.folder)
    job.fit(watch, max_steps=20)
    assert job.learned() == [] and not monitor.messages(Sections)
    until(lambda: monitor.messages(Detach), "the end of the watch")
    in_training, in_validation = 20 + 3, 2 + 3 + 2 * 2  # each batch, each beginning and each end
    saves = 2 * 5
    assert len(monitor.messages(Heartbeat)) == in_training + in_validation + saves
    job.fit(watch, max_steps=40)
    assert job.learned() == ["initial", "subsequent"]


@BOTH
def test_when_the_flag_is_written(job: Job, kind: Any) -> None:
    def fit(*others: Any, **limits: Any) -> str:
        job.flag.unlink(missing_ok=True)
        job.fit(kind(True, False), *others, **limits)
        return job.flag.read_text().strip() if job.flag.exists() else ""

    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
            trainer.should_stop = True

    class OfTheJob(Timer):
        def state_dict(self) -> dict[str, Any]:
            return {}

    assert fit(max_steps=8) == "step 8 of 8"
    assert fit(max_steps=8) == "step 8 of 8", "an empty run says so again"
    assert fit(Stop(), max_epochs=1) == "", "stopped before the epoch's end"
    assert fit(max_epochs=2) == "epoch 2 of 2"
    assert fit(OfTheJob(SHORT)) == "", "the next job has a second of its own"
    assert fit(max_time=SHORT).startswith("its time was up after step")
    assert fit(limit_train_batches=0).startswith("nothing left to do after step")
    assert fit(EarlyStopping("loss", patience=1, verbose=False)).startswith("stopped early after step")


@BOTH
def test_a_failed_fit_leaves_nothing(job: Job, monitor: FakeMonitor, kind: Any) -> None:
    watch = kind(True, True, exp_dir=job.folder)
    job.fit(kind(False, False), max_steps=4)
    for where in ("training", "validation"):
        with pytest.raises(ValueError, match="bad"):
            job.fit(watch, model=Model(ValueError("bad"), 2, where), max_epochs=2)
        with pytest.raises(SystemExit):
            job.fit(watch, model=Model(SystemExit(3), 2, where), max_epochs=2)
    assert not job.flag.exists() and "out_of_section" not in job.learned() and "initial" not in job.learned()
    until(lambda: len(monitor.messages(Detach)) == 5, "an end of the watch for each fit")


@BOTH
@pytest.mark.parametrize("calm", [SystemExit(0), _TunerExitException()])
def test_a_calm_exit_teaches_and_leaves_no_flag(job: Job, monitor: FakeMonitor, kind: Any, calm: BaseException) -> None:
    watch = kind(True, True, exp_dir=job.folder)
    job.fit(watch, max_steps=20)
    job.flag.unlink()
    try:
        job.fit(watch, model=Model(calm, BATCHES - 2), max_steps=100)
    except SystemExit:
        assert isinstance(calm, SystemExit)
    assert not job.flag.exists()
    wanted = ["initial", "subsequent"] if kind is FaultToleranceCallback else ["checkpointing", "setup", "step"]
    assert set(wanted) <= set(job.learned())


def test_saves_in_the_background_teach_nothing_of_saves(job: Job, monitor: FakeMonitor) -> None:
    watch = FaultToleranceSectionsCallback(True, True, exp_dir=job.folder)
    for steps in (20, 40):
        # Lightning removes a former checkpoint while the thread may still be writing that, which then fails.
        job.fit(watch, max_steps=steps, plugins=[AsyncCheckpointIO()], kept=-1)
    assert job.learned() == ["setup", "step", "out_of_section"]
    assert heard_sections(monitor)[-2:] == ["checkpointing", "-"], "the wait for the last save"


def test_a_policy_for_failures_speaks_to_the_launcher(job: Job, monitor: FakeMonitor) -> None:
    def policy(error: BaseException) -> WorkloadControlRequest:
        return WorkloadControlRequest(WorkloadAction.ExcludeThisNode, str(error))

    watch = FaultToleranceSectionsCallback(True, True, exp_dir=job.folder, exc_handling_policy=policy)
    with pytest.raises(ValueError):
        job.fit(watch, model=Model(ValueError("broken memory")), max_steps=8)
    assert monitor.wait_for(ControlRequest) == [ControlRequest("exclude_this_node", "broken memory")]


@BOTH
def test_evaluation_alone_is_not_watched(job: Job, monitor: FakeMonitor, kind: Any) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[kind(True, True)], enable_progress_bar=False)
    trainer.validate(Model(), verbose=False)
    trainer.test(Model(), verbose=False)
    assert not monitor.received and not job.flag.exists()


@BOTH
def test_trains_without_a_launcher_and_without_a_place_for_files(
    tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    monkeypatch.delenv(env.FINISHED_FLAG_FILE, raising=False)
    caplog.set_level(logging.INFO)
    (tmp_path / "_ft_state.json").write_text('{"current')
    Job(tmp_path).fit(kind(True, True, exp_dir=tmp_path), max_steps=8)
    (tmp_path / "ft_state").touch()
    Job(tmp_path).fit(kind(True, True), max_steps=12)
    assert caplog.text.count(f"{env.FINISHED_FLAG_FILE} is not set") == 2
    assert caplog.text.count("_ft_state.json is not used: ") == 1


def test_huge_limits_harm_nobody(job: Job, monitor: FakeMonitor) -> None:
    beats = {"initial": 1e300, "subsequent": 10.0, "were_calculated": True}
    (job.folder / "_ft_state_.json").write_text(json.dumps({"current_timeouts": {"heartbeat": beats}}))
    job.fit(FaultToleranceCallback(True, True, exp_dir=job.folder), max_steps=8)
    assert job.flag.exists()


@pytest.mark.parametrize("given", [MappingProxyType, SimulatedFaultParams, None])
def test_what_a_simulated_fault_may_be_given_as(given: Any) -> None:
    words: Mapping[str, Any] = {"fault_type": "rank_hung", "base_delay": 33.0, "rand_delay": 2.0, "rank_to_fail": 1}
    fault = None if given is None else given(words) if given is MappingProxyType else given(**words)
    watch = FaultToleranceCallback(True, True, simulated_fault_params=fault)
    assert watch.simulated_fault_params == (given and SimulatedFaultParams("rank_hung", 33.0, 2.0, 1))


@pytest.mark.parametrize(
    "words", [{"fault_type": "tired", "base_delay": 1}, {"fault_type": "rank_hung"}, {"rank": 1}, 7]
)
def test_what_is_no_fault_is_an_error_before_the_training(words: Any) -> None:
    with pytest.raises(ValueError, match="simulated_fault_params="):
        FaultToleranceSectionsCallback(True, True, words)


def test_a_trainer_of_the_other_lightning(job: Job, monitor: FakeMonitor) -> None:
    other = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    watch = FaultToleranceSectionsCallback(True, True, exp_dir=job.folder)
    job.fit(watch, model=model_class(other)(), framework=other, max_steps=20)
    assert job.learned() == ["checkpointing", "step"] and job.flag.exists()


@pytest.mark.slow
def test_who_imports_the_other_lightning_gets_callbacks_of_it() -> None:
    code = "import sys, pytorch_lightning as pl\nfrom ft_client.integrations.lightning import FaultToleranceCallback\n"
    code += "assert issubclass(FaultToleranceCallback, pl.Callback) and 'lightning.pytorch' not in sys.modules"
    python(code, limit_s=120)


BOTH_ARE_THERE = {"lightning": "2.6.6", "pytorch-lightning": "2.6.6"}


@pytest.mark.parametrize(
    ("module", "loaded", "installed"),
    [
        ("lightning.pytorch", (), BOTH_ARE_THERE),
        ("lightning.pytorch", ("pytorch_lightning", "lightning.pytorch"), BOTH_ARE_THERE),
        ("pytorch_lightning", ("pytorch_lightning",), BOTH_ARE_THERE),
        ("pytorch_lightning", (), {"pytorch-lightning": "2.4.0"}),
        ("lightning.pytorch", (), {"lightning": "3.0.dev0"}),
    ],
)
def test_which_lightning_is_used(module: str, loaded: tuple[str, ...], installed: dict[str, str]) -> None:
    assert choose(loaded, installed) == module


@pytest.mark.parametrize(
    ("words", "installed"),
    [("not installed here: pip install", {}), ("lightning 2.1.4 is too old", {"lightning": "2.1.4"})],
)
def test_none_or_an_old_one_is_one_clear_error(words: str, installed: dict[str, str]) -> None:
    with pytest.raises(ImportError, match=words):
        choose((), installed)


def test_an_old_one_on_the_path_is_told(tmp_path: Path) -> None:
    found = tmp_path / "lightning-2.1.4.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.1.4\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from ft_client.integrations.lightning import FaultToleranceCallback"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("ImportError: lightning 2.1.4 is too old"), done.stderr


def test_stragglers_report_to_the_loggers(job: Job, monitor: FakeMonitor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo_logger.StragglerDetectionCallback")
    watch = StragglerDetectionCallback(0.01, True, True, 5, 0.7, 0.7, False, True)
    logger = pl.loggers.CSVLogger(job.folder, name=None, version="")
    job.fit(watch, max_steps=100, logger=logger, log_every_n_steps=1)
    columns = (job.folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"section_relative_perf/min", "section_individual_perf/median"} <= set(columns)
    assert "Section relative performance:" in caplog.text and "Rank=0" in caplog.text
    with pytest.raises(ValueError, match="gpu_relative_perf_threshold"):
        StragglerDetectionCallback(0.01, True, True, 5, 7, 0.7, False, True)


def test_a_straggler_stops_the_fit_which_is_not_complete(job: Job, monitor: FakeMonitor) -> None:
    class Slower(Model):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            time.sleep(0.002 if self.global_step < BATCHES else 0.02)
            return super().training_step(batch, index)

    watch = StragglerDetectionCallback(0.05, False, True, 0, 0.7, 0.7, True, False)
    trainer = job.fit(watch, FaultToleranceCallback(True, False), model=Slower(), max_epochs=50)
    assert trainer.should_stop and trainer.global_step < 50 * BATCHES and not job.flag.exists()
    resumed = job.fit(FaultToleranceCallback(True, False), max_steps=trainer.global_step)
    assert resumed.global_step == trainer.global_step and job.flag.exists()
