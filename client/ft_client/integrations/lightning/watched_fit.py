"""The base of both callbacks that watch `fit`: begin, end, failure, learned limits and finished flag.

The subclasses in `callbacks.py` decide what is a sign of life, and which limits are learned; `fit.py` decides what
follows from the facts. Outside of `fit` (validate, test, predict) nothing is watched and nothing is written.

Some hooks are collectives: loading limits at the start, learning them, and the finished flag at the end. Lightning
calls the hooks on all ranks in the same order, and where a rank may be missing, after an exception, nothing is asked of
other ranks.
"""

from __future__ import annotations

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_client.control import WorkloadControlRequest
from ft_client.errors import RankMonitorClientError
from ft_client.inject import SimulatedFaultParams, simulate_fault
from ft_client.integrations.lightning import next_job
from ft_client.integrations.lightning.fit import Fit, TrainerProgress, completion_reason
from ft_client.integrations.lightning.framework import Callback
from ft_client.integrations.lightning.saved_form import is_save_in_memory
from ft_client.rank.agreement import group
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import env

LOGGER_NAME = "nemo_logger.FaultToleranceCallback"


class FitWatch(Callback):
    """A Lightning callback that watches one `fit`. The base class of `FaultToleranceCallback` and its sibling.

    Args:
        autoresume: whether to write the finished flag when the training is complete, to the file that the variable
            FAULT_TOL_FINISHED_FLAG_FILE names.
        calculate_timeouts: whether to load the limits that earlier jobs learned, learn them again, and save them for
            the next job.
        simulated_fault_params: a fault on purpose some time after `fit` begins: `SimulatedFaultParams`, or a mapping
            with its fields.
        exp_dir: the folder of the learned limits, the same for all jobs. None: `ft_state` in the trainer's `log_dir`,
            which with most loggers is another folder for each job.
        logger_name: the name of the logger that is used.
        exc_handling_policy: called with the exception when `fit` fails. The request that it returns is sent to the
            launcher; None: no request.

    Raises:
        ValueError: `simulated_fault_params` is not a valid fault.
    """

    TIMEOUTS_FILENAME = next_job.LIMITS
    FT_DIR_NAME = "ft_state"

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: Any = None,
        exp_dir: str | Path | None = None,
        logger_name: str | None = LOGGER_NAME,
        exc_handling_policy: Callable[[BaseException], WorkloadControlRequest | None] | None = None,
    ) -> None:
        super().__init__()
        self.autoresume, self.calculate_timeouts = autoresume, calculate_timeouts
        self.simulated_fault_params = _fault_of(simulated_fault_params)
        self.logger = logging.getLogger(logger_name)
        self._exp_dir = exp_dir
        self._policy = exc_handling_policy
        self._client: RankMonitorClient | None = None
        self._fit = Fit()
        self._folder = Path()

    # For subclasses.

    def _began(self, client: RankMonitorClient, trainer: Any) -> None:
        """Called when the watch has begun, at the start of `fit`."""

    def _over(self, client: RankMonitorClient, failed: bool) -> None:
        """Called when `fit` is over, before the watch ends.

        Args:
            client: the client of this `fit`.
            failed: whether an exception ended `fit`.
        """

    @abstractmethod
    def _learn(self, client: RankMonitorClient, final: bool) -> bool:
        """Learns limits from what was seen so far. Returns whether any was learned. Collective.

        Raises:
            RankMonitorClientError: nothing was seen from which a limit could be learned.
            RuntimeError: another rank is lost.
        """

    # Lightning's hooks.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._fit = Fit()
        self._client = client = RankMonitorClient()
        if self.autoresume and not os.environ.get(env.FINISHED_FLAG_FILE):
            self._say(logging.WARNING, f"{env.FINISHED_FLAG_FILE} is not set: no finished flag will be written")
        if self.calculate_timeouts:
            self._load_limits(client, trainer)
        client.init_workload_monitoring()
        self._began(client, trainer)
        if self.simulated_fault_params is not None:
            simulate_fault(self.simulated_fault_params)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        client = self._client
        if stage == "fit" and client is not None:
            self._over(client, failed=False)
            if self.autoresume:
                self._leave_flag(trainer)
            self._learn_and_keep(client, final=True)
            self._end(client)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        client = self._client
        if client is None:
            return
        # A callback that ends the job after a save calls sys.exit(0) on all ranks at the same step: the ranks can still
        # learn together. A signal finds each rank somewhere else.
        calm = isinstance(exception, SystemExit) and not exception.code and not trainer.received_sigterm
        self._over(client, failed=not calm)
        if calm:
            self._learn_and_keep(client, final=True)
        if self._policy is not None:
            request = self._policy(exception)
            if request is not None:
                client.send_workload_control_request(request)
        self._end(client)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        client = self._client
        if client is not None:
            client.report_iteration(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        self._fit.batches += 1
        client = self._client
        if client is not None and client.iteration != trainer.global_step:
            client.report_iteration(trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._fit.ended = True

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._fit.loaded = True

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if not is_save_in_memory(trainer):
            self._fit.saved = True

    # Within.

    def _end(self, client: RankMonitorClient) -> None:
        """Ends the watch of this `fit`."""
        self._client = None
        client.shutdown_workload_monitoring()

    def _load_limits(self, client: RankMonitorClient, trainer: Any) -> None:
        """Loads on all ranks the limits that rank 0 finds. Collective.

        Other nodes may not see rank 0's file, or may see another file under the same name.
        """
        if self._exp_dir is not None:
            self._folder = Path(self._exp_dir)
        else:  # every rank asks, since Lightning answers by a broadcast
            self._folder = Path(trainer.log_dir or trainer.default_root_dir) / self.FT_DIR_NAME
        texts = []
        if group.rank() == 0:
            found = next_job.read_limits(self._folder, self.logger)
            if found is not None:
                texts.append(json.dumps(found))
        for text in group.union_over_ranks(texts):
            client.load_state_dict(json.loads(text))
            self._say(logging.INFO, f"Fault tolerance timeouts loaded from {self._folder}: {text}")

    def _learn_and_keep(self, client: RankMonitorClient, final: bool) -> None:
        """Learns limits, and has rank 0 write them for the next job. Collective. A failure is logged only.

        Args:
            client: the client of this `fit`.
            final: whether `fit` is over.
        """
        if not self.calculate_timeouts:
            return
        try:
            if self._learn(client, final) and group.rank() == 0:
                next_job.write_limits(self._folder, client.state_dict(), self.logger)
        except (RankMonitorClientError, RuntimeError) as problem:
            self.logger.warning("no limit is learned: %s", problem)

    def _leave_flag(self, trainer: Any) -> None:
        """Writes the finished flag if the training is complete on all ranks. Collective."""
        reason = completion_reason(self._fit, progress_of(trainer))
        try:
            complete = bool(group.min_over_ranks([float(reason is not None)])[0])
        except RuntimeError as problem:
            self.logger.warning("no finished flag is written: %s", problem)
            return
        if group.rank() != 0:
            return
        file = os.environ.get(env.FINISHED_FLAG_FILE)
        if not complete:
            self._say(logging.INFO, "training is not complete, no finished flag is written")
        elif file:
            next_job.write_finished_flag(Path(file), str(reason), self.logger)

    def _say(self, level: int, text: str) -> None:
        """Logs a text, on rank 0 only."""
        if group.rank() == 0:
            self.logger.log(level, "[FaultToleranceCallback@rank0] %s", text)


def progress_of(trainer: Any) -> TrainerProgress:
    """Returns the progress of a trainer, of either package of Lightning, at the end of `fit`."""
    return TrainerProgress(
        step=trainer.global_step,
        max_steps=trainer.max_steps,
        epoch=trainer.current_epoch,
        max_epochs=trainer.max_epochs,
        asked_to_stop=trainer.should_stop,
        at_end_of_epoch=trainer.is_last_batch,
        early_stopped=any(map(_stopped_early, trainer.early_stopping_callbacks)),
        time_is_up=any(map(_time_is_up, trainer.callbacks)),
    )


def _time_is_up(callback: Any) -> bool:
    """Returns whether a callback is a timer of the whole training whose time has passed.

    A timer without a state begins anew in each job, and so says nothing about the training.
    """
    if hasattr(callback, "time_remaining"):
        left_s = callback.time_remaining()
    else:
        left_s = None
    return left_s is not None and left_s <= 0 and bool(callback.state_dict())


def _stopped_early(callback: Any) -> bool:
    """Returns whether a callback for early stopping has stopped the training."""
    reason = getattr(callback, "stopping_reason", None)  # None before Lightning 2.6
    if reason is None:
        return bool(callback.stopped_epoch)
    return bool(reason.value)


def _fault_of(params: Any) -> SimulatedFaultParams | None:
    """Returns the fault that the user described, as an object or by a mapping of its arguments.

    Raises:
        ValueError: it is not a valid fault.
    """
    if params is None or isinstance(params, SimulatedFaultParams):
        return params
    try:
        return SimulatedFaultParams(**params)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"simulated_fault_params={params!r}: {problem}") from None
