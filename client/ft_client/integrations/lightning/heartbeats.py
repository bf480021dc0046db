"""`FaultToleranceCallback`: a heartbeat at every batch of training and evaluation; learns the limits of heartbeats."""

from __future__ import annotations

from typing import Any

from ft_client.agreement import group
from ft_client.integrations.lightning.watch import FitWatch
from ft_client.rank_monitor_client import RankMonitorClient


class FaultToleranceCallback(FitWatch):
    """Watches `fit` by heartbeats; see `FitWatch` for its arguments.

    Limits are learned at the end of a job that loaded and saved a checkpoint: for a training that begins from nothing,
    at the end of its second job.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._beat()
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        self._beat()
        super().on_train_batch_end(trainer, *batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._beat()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._beat()

    def on_validation_batch_end(self, *batch: Any) -> None:
        self._beat()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._beat()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._beat()
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def _over(self, client: RankMonitorClient, failed: bool) -> None:
        if not failed:
            client.send_heartbeat()

    def _learn(self, client: RankMonitorClient, final: bool) -> bool:
        if not group.min_over_ranks([float(self._fit.teaches_heartbeats())])[0]:
            return False
        return client.calculate_and_set_hb_timeouts()

    def _beat(self) -> None:
        if self._client is not None:
            self._client.send_heartbeat()
