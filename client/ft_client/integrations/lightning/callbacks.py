"""The callbacks that watch `fit`, by heartbeats and by sections, and learn the limits of these.

Lightning calls the hooks (`on_...`) of a callback on every rank, in the thread that trains. A hook tells the rank's
monitor what the training does; it blocks only where ranks agree on learned limits. What both callbacks have in common
is in `watched_fit.py`; `fit.py` decides which section is open, and which limits may be learned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ft_client.integrations.lightning.fit import LEARNABLE, FitEvent, section_after
from ft_client.integrations.lightning.saved_form import is_save_in_memory
from ft_client.integrations.lightning.watched_fit import FitWatch
from ft_client.rank.agreement import group
from ft_client.rank.monitoring.learned_limits import OUT_OF_SECTION, STEP
from ft_client.rank_monitor_client import RankMonitorClient
from ft_client.straggler.callables import CallableId, Wrapped


class FaultToleranceCallback(FitWatch):
    """Watches `fit` by heartbeats: one at each batch, and at the start and end of training and evaluation.

    For the arguments see `FitWatch`. Limits are learned at the end of a job that loaded and saved a checkpoint: usually
    the second job of a training.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._send_heartbeat()
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        self._send_heartbeat()
        super().on_train_batch_end(trainer, *batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._send_heartbeat()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._send_heartbeat()

    def on_validation_batch_end(self, *batch: Any) -> None:
        self._send_heartbeat()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._send_heartbeat()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._send_heartbeat()
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def _over(self, client: RankMonitorClient, failed: bool) -> None:
        if not failed:
            client.send_heartbeat()

    def _learn(self, client: RankMonitorClient, final: bool) -> bool:
        if not group.min_over_ranks([float(self._fit.teaches_heartbeats())])[0]:
            return False
        return client.calculate_and_set_hb_timeouts()

    def _send_heartbeat(self) -> None:
        """Sends a heartbeat while `fit` is watched."""
        if self._client is not None:
            self._client.send_heartbeat()


class FaultToleranceSectionsCallback(FitWatch):
    """Watches `fit` by sections. For the arguments see `FitWatch`.

    The sections, of which at most one is open at a time:

    - `setup`: from the start of `fit` to the first batch.
    - `step`: each batch of training or evaluation.
    - `checkpointing`: each save, each removal of an old checkpoint, and each wait for a checkpoint that is still being
      written.

    All other time is out of sections. Limits are learned after each save and at the end of the job:

    - the limit of `setup` when a checkpoint was loaded;
    - the limit of `step` after 16 batches;
    - the limit of `checkpointing` after a save, unless saves go on in the background;
    - the time out of sections at the end of a job that saw all of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._now: str | None = None
        self._saves = Wrapped()
        self._taught_by_save = True
        self._saves_later = False
        self._evaluated = 0

    def on_train_batch_start(self, *batch: Any) -> None:
        self._on(FitEvent.STEP)

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        """Ends the section `step`. The first batch after a save learns from the save, on all ranks together.

        Not in the hook of the save: it comes before the checkpoint is written, when the save has no duration yet.
        """
        self._on(FitEvent.STEP_OVER)
        super().on_train_batch_end(trainer, *batch)
        if self._client is not None and not self._taught_by_save:
            self._taught_by_save = True
            self._learn_and_keep(self._client, final=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._on(FitEvent.STEP_OVER)  # of a batch that ended the epoch by returning -1 at its start

    def on_validation_batch_start(self, *batch: Any) -> None:
        """Opens a section for a batch of evaluation.

        The first batches of evaluation may take longer than steps of training. Where the limit of `step` was learned
        from training, they are in a section of their own, which no learned limit judges.
        """
        client = self._client
        if client is None:
            return
        self._evaluated += 1
        assert client.cfg is not None and client.section_timeouts is not None
        early = self._evaluated <= client.cfg.num_warmup_iterations
        learned = STEP in client.section_timeouts.calculated_sections
        if early and learned:
            self._on(FitEvent.EARLY_EVALUATION)
        else:
            self._on(FitEvent.STEP)

    def on_validation_batch_end(self, *batch: Any) -> None:
        self._on(FitEvent.STEP_OVER)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if not is_save_in_memory(trainer):
            self._taught_by_save = False

    def _began(self, client: RankMonitorClient, trainer: Any) -> None:
        """Wraps what saves and removes checkpoints, so that each such call is in the section `checkpointing`.

        Lightning has no hook for these: `on_save_checkpoint` comes before the file is written.
        """
        self._now, self._evaluated, self._taught_by_save = None, 0, True
        writer = trainer.strategy.checkpoint_io
        finalizes = hasattr(writer, "maybe_finalize_save_checkpoint")
        self._saves_later = finalizes or "AsyncCheckpointIO" in (base.__name__ for base in type(writer).__mro__)
        saves = [(trainer, "save_checkpoint"), (trainer.strategy, "remove_checkpoint"), (writer, "teardown")]
        if finalizes:
            saves.append((writer, "maybe_finalize_save_checkpoint"))
        saving = _Saving(self._on, lambda: self._discount(trainer))
        for owner, name in saves:
            self._saves.wrap(CallableId(owner, name), saving)
        self._on(FitEvent.BEGAN)

    def _discount(self, trainer: Any) -> None:
        """Has a save in memory teach no limit: it takes less time than one on disk, for which the limit is."""
        if is_save_in_memory(trainer) and self._client is not None and self._now is not None:
            self._client.discount(self._now)

    def _over(self, client: RankMonitorClient, failed: bool) -> None:
        # What an exception cut off was open for an unusual time: it must not teach a limit.
        if failed and self._now is not None:
            client.discount(self._now)
        self._on(FitEvent.OVER)
        self._saves.restore()

    def _learn(self, client: RankMonitorClient, final: bool) -> bool:
        # All ranks learn the same sections: only those that every rank has seen.
        own = self._fit.teaches_sections(final, self._saves_later)
        of_all = group.min_over_ranks([float(name in own) for name in LEARNABLE])
        agreed = [name for name, taught in zip(LEARNABLE, of_all, strict=True) if taught]
        if not agreed:
            return False
        self._say(logging.INFO, f"Updating FT timeouts for: {agreed}")
        sections = [name for name in agreed if name != OUT_OF_SECTION]
        return client.calculate_and_set_section_timeouts(sections, calc_out_of_section=OUT_OF_SECTION in agreed)

    def _on(self, event: FitEvent) -> None:
        """Opens and closes sections for an event. Does nothing without a client."""
        client = self._client
        if client is None:
            return
        before, self._now = self._now, section_after(self._now, event)
        if before != self._now:
            if before is not None and client.is_open(before):
                client.end_section(before)
            if self._now is not None:
                client.start_section(self._now)


class _Saving:
    """A context around each save, in which the section `checkpointing` is open.

    Saves may be nested: `Wrapped` enters the context only for the outermost.

    Args:
        on: called when a save begins and when it has ended well.
        discount: called before the second, to have the time of some saves left out of what is learned.
    """

    def __init__(self, on: Callable[[FitEvent], None], discount: Callable[[], None]) -> None:
        self._on, self._discount, self.is_open = on, discount, False

    def __enter__(self) -> None:
        self.is_open = True
        self._on(FitEvent.SAVE)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.is_open = False
        if error is None:  # the section of a failed save stays open: its duration must not teach a limit
            self._discount()
            self._on(FitEvent.SAVED)
