"""`RankMonitorClient`: the training's side of the watch, with NVIDIA's names, as the training calls it.

Signs of life are in `rank/monitoring/signs_of_life.py`, learned limits in `rank/monitoring/limits_in_force.py`; only
the monitor judges by a limit. Only `init_workload_monitoring` waits for the monitor, for a bounded time; only misuse is
raised into the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from ft_client.control import WorkloadControlRequest
from ft_client.errors import RankMonitorClientError
from ft_client.rank.monitoring import process
from ft_client.rank.monitoring.learned_limits import HeartbeatTimeouts, SectionTimeouts
from ft_client.rank.monitoring.limits_in_force import LimitsInForce
from ft_client.rank.monitoring.link import Link
from ft_client.rank.monitoring.signs_of_life import SignsOfLife, not_initialized
from ft_client.rank.saving import SaveSchedule, interval_of
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import to_json
from rank_monitor.contract.wire.messages import Attach, ControlRequest, Detach, Hello, Message, Sections

logger = logging.getLogger("ft_client")

# A training whose monitor does not answer begins without it after this.
_WELCOME_WAIT_S = 5.0
# A request to the launcher is worth a longer wait than a message that the next one replaces.
_REQUEST_TIMEOUT_S = 1.0
# The training is over: a monitor that does not read must not hold up its end.
_DETACH_TIMEOUT_S = 0.1
# In JSON at most 24,000 bytes: it fits into one message.
_MAX_DESCRIPTION = 4000

_warned_unwatched = False


class SettingsInForce(MonitorSettings):
    """The monitor's settings as `RankMonitorClient.cfg` has them."""

    def to_yaml_file(self, cfg_path: str) -> None:
        """Writes what differs from the defaults as a file that the launcher and NVIDIA's configuration read.

        JSON, which is YAML: our package needs no library for it.
        """
        defaults = vars(MonitorSettings())
        given = {key: value for key, value in to_json(self).items() if vars(self)[key] != defaults[key]}
        Path(cfg_path).write_text(json.dumps({"fault_tolerance": given}, indent=1) + "\n")


class RankMonitorClient(SignsOfLife):
    """The client of a training. In a process only the one that was initialised last is in use.

    Attributes:
        is_initialized: between `init_workload_monitoring` and `shutdown_workload_monitoring`.
        cfg: the monitor's settings; None before `init_workload_monitoring`.
    """

    active: RankMonitorClient | None = None
    """The client that was initialised last in this process."""
    _calls = 0
    """How often an in-process wrapper called the training's function in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg: SettingsInForce | None = None
        self._limits = LimitsInForce()
        self._limits_to_send = False
        self._warmup_steps: int | None = None
        self._watched = self._attached = self._knows_limits = False
        self._of_call = 0
        self._saves, self._saves_by_setting = SaveSchedule(), SaveSchedule()

    @classmethod
    def call_began(cls, now_ns: int) -> None:
        """Called when an in-process wrapper calls the training's function: it may initialise its client again."""
        RankMonitorClient._calls += 1
        if cls.active is not None:
            cls.active.begin_anew(now_ns)
            # Ranks were interrupted after different steps.
            cls.active._saves, cls.active._saves_by_setting = SaveSchedule(), SaveSchedule()

    def init_workload_monitoring(
        self, num_warmup_iters: int | None = None, *, get_state_dict_cb: object = None, chkpt_manager: object = None
    ) -> None:
        """Asks the monitor to watch this training, and takes over its settings. Blocks for up to 5 s.

        Without a launcher nothing is watched.

        Args:
            num_warmup_iters: first steps that are not judged by a learned limit; None: as configured.
            get_state_dict_cb: accepted, with a warning, for code written against release 0.1 of NVIDIA's package.
            chkpt_manager: accepted for the same.

        Raises:
            RankMonitorClientError: called twice in a call of a wrapped function, or `num_warmup_iters` is not a count.
        """
        if self.is_initialized and self._of_call == RankMonitorClient._calls:
            raise RankMonitorClientError("init_workload_monitoring() was called twice")
        self._warmup_steps = _count(num_warmup_iters)
        if get_state_dict_cb is not None:
            logger.warning("get_state_dict_cb is never called: the monitor keeps no state, load it from a checkpoint")
        self._of_call = RankMonitorClient._calls
        RankMonitorClient.active = self
        link = process.start()
        self._watched = link is not None
        settings = None
        if link is None:
            _warn_unwatched()
        else:
            settings = self._attach(link)
        self._knows_limits = settings is not None
        self.is_initialized = True
        self._settle(settings or MonitorSettings())

    def should_save(self, interval_s: float | None = None) -> bool:
        """Whether to save after this step: the same on all ranks of the default process group. Collective now and then.

        To be called after the same steps on every rank. Time is that of rank 0, and the time of a save does not count.

        Args:
            interval_s: seconds of training between two saves; None: `--ft-save-interval`, as rank 0 knows it. Without
                either, never. All ranks give it, or none does.

        Raises:
            RankMonitorClientError: not initialised, or the interval is not above zero.
        """
        if not self.is_initialized:
            raise not_initialized("should_save")
        if interval_s is None:
            setting = None
            if self.cfg is not None:
                setting = interval_of(self.cfg.save_interval, os.environ)
            return self._saves_by_setting.is_due(setting, monotonic())
        if not interval_s > 0:
            raise RankMonitorClientError(f"a save interval of {interval_s!r} s is not above zero")
        return self._saves.is_due(interval_s, monotonic())

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Learns the limits of heartbeats from the longest intervals of all ranks. Collective.

        Args:
            skip_if_not_ready: return False instead of raising when a rank has not seen enough.

        Returns:
            Whether they were set. Without a launcher, False.

        Raises:
            RankMonitorClientError: not initialised; a rank has not seen two signs of life.
        """
        if not self.is_initialized:
            raise not_initialized("calculate_and_set_hb_timeouts")
        if not self._watched or process.is_forked():
            return False
        return self._limits.learn_heartbeats(self._observed.longest(), skip_if_not_ready) and self._set_limits()

    calculate_and_set_timeouts = calculate_and_set_hb_timeouts
    """Its name in releases 0.1 and 0.2 of NVIDIA's package."""

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Learns the limits of sections from the longest intervals of all ranks. Collective.

        Args:
            selected_sections: the same on every rank; None: all that any rank has seen.
            calc_out_of_section: learn the limit of the time with no section open, too.
            skip_if_not_ready: set nothing and return False when something that was asked for was never seen.

        Returns:
            Whether any was set. What was never seen is left out with a warning. Without a launcher, False.

        Raises:
            RankMonitorClientError: not initialised; no rank has seen anything of it; or one of these sections is open
                on some rank and was not closed before on any.
        """
        if not self.is_initialized:
            raise not_initialized("calculate_and_set_section_timeouts")
        if not self._watched or process.is_forked():
            return False
        seen, opened = self._observed.longest(), tuple(self._open)
        learned = self._limits.learn_sections(seen, opened, selected_sections, calc_out_of_section, skip_if_not_ready)
        return learned and self._set_limits()

    def state_dict(self) -> dict[str, Any]:
        """The learned limits, as JSON values; the same on every rank."""
        return self._limits.now.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the limits learned by another run. Other limits stay as they are.

        An invalid state, of another version for example, is ignored with a warning: the training goes on.

        Raises:
            RankMonitorClientError: it is not a mapping.
        """
        self._limits.load(state)
        if self.is_initialized:
            self._set_limits()

    @property
    def hb_timeouts(self) -> HeartbeatTimeouts | None:
        """The limits of heartbeats in force; None before `init_workload_monitoring`."""
        if self.cfg is None:
            return None
        return self._limits.now.heartbeats

    @property
    def timeouts(self) -> HeartbeatTimeouts | None:
        """`hb_timeouts`, by its name in releases 0.1 and 0.2 of NVIDIA's package."""
        return self.hb_timeouts

    @property
    def section_timeouts(self) -> SectionTimeouts | None:
        """The limits of sections in force; None before `init_workload_monitoring`."""
        if self.cfg is None:
            return None
        return self._limits.now.sections

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Asks the launcher to restart, to exclude this node, or to end the job.

        Raises:
            RankMonitorClientError: not initialised.
        """
        if not self.is_initialized:
            raise not_initialized("send_workload_control_request")
        link = self._link
        if link is not None:
            message = ControlRequest(req.action.value, str(req.description)[:_MAX_DESCRIPTION])
            if not link.post(message, monotonic_ns(), _REQUEST_TIMEOUT_S):
                logger.warning("the monitor does not answer: the request %s was not sent", req.action.name)

    @contextlib.contextmanager
    def get_parameters_update_section(self) -> Iterator[None]:
        """Sends a heartbeat at the end of its body. Part of release 0.1 of NVIDIA's package."""
        yield
        self.send_heartbeat()

    def get_checkpoint_from_rmon(self) -> dict[str, Any]:
        """Returns nothing, as at a first start there. Part of release 0.1 of NVIDIA's package.

        The monitor keeps no state of the training; callers load the checkpoint on disk then.
        """
        return {}

    def shutdown_workload_monitoring(self) -> None:
        """Ends the watch: the monitor judges nothing any more. May be called at any time, and twice."""
        if not self.is_initialized:
            return
        self.is_initialized = False
        self._open.clear()
        if RankMonitorClient.active is self:
            RankMonitorClient.active = None
        link, self._link = self._link, None
        if link is not None:
            link.set_source(None)
            link.post(Detach(), monotonic_ns(), _DETACH_TIMEOUT_S)

    # What the link asks for: a `StateSource`.

    def state(self) -> list[tuple[Message, int]]:
        """The whole state of this training for a monitor."""
        now_ns, seen, opened = monotonic_ns(), self._observed, self._open.copy()
        hello = Hello(
            pid=os.getpid(),
            attached=self._attached,
            last_sign_ns=seen.last_sign_ns,
            got_first_sign=seen.got_first_sign,
            num_warmup_iterations=self._warmup_steps,
        )
        messages: list[tuple[Message, int]] = [(hello, now_ns)]
        if not self._attached:
            messages.append((Attach(self._warmup_steps), seen.last_sign_ns))
        if self._limits_to_send:
            messages.append((self._limits.now.message(), now_ns))
        if seen.got_first_sign:  # what is said again is not a new sign of life
            sections = Sections(tuple(opened.items()), self.iteration)
            if opened:
                messages.append((sections, seen.last_sign_ns))
            else:
                messages.append((sections, seen.out_since_ns))
        return messages

    def disconnect(self) -> None:
        """Makes every call do nothing: another client is in use, or this is a forked child."""
        self._link = None

    # Within.

    def _attach(self, link: Link) -> MonitorSettings | None:
        now_ns = monotonic_ns()
        self._observed.begin(now_ns)
        self._open.clear()
        self._attached = False
        self._link = link
        link.set_source(self)
        settings = link.ask(Attach(self._warmup_steps), now_ns, _WELCOME_WAIT_S)
        self._attached = True
        if link.closed:
            self._link = None
            logger.warning("the monitor refused this process, which is not watched: %s", link.refused)
        elif settings is None:
            logger.warning("no answer of the monitor within %g s; training goes on without it", _WELCOME_WAIT_S)
        return settings

    def _settle(self, settings: MonitorSettings) -> None:
        """Takes over the settings, and puts limits in force that were loaded before."""
        self.cfg = SettingsInForce(**vars(settings))
        logger.setLevel(settings.log_level)
        if self._warmup_steps is None:
            self._observed.warm_up(settings.num_warmup_iterations)
        else:
            self._observed.warm_up(self._warmup_steps)
        self._limits.settle(settings)
        if self._limits.now.learned:
            self._set_limits()

    def _set_limits(self) -> bool:
        """Sends the limits in force to the monitor, unless its own limits are not known here. Returns True."""
        limits, link = self._limits.now, self._link
        if link is not None and self._knows_limits:
            logger.info("limits in force: %s", limits.seconds)
            try:
                message, self._limits_to_send = limits.message(), True
                link.post(message, monotonic_ns())
            except ValueError as problem:
                self._limits_to_send = False
                logger.warning("the monitor keeps its limits: %s", problem)
        return True


def _count(value: int | None) -> int | None:
    try:
        if value is None:
            count = None
        else:
            count = operator.index(value)
    except TypeError:
        count = -1
    if count is not None and count < 0:
        raise RankMonitorClientError(f"num_warmup_iters={value!r} is not a count")
    return count


def _warn_unwatched() -> None:
    global _warned_unwatched
    if not _warned_unwatched and not process.is_forked():
        _warned_unwatched = True
        logger.warning("not started by ft_launcher: nobody watches this process, monitoring calls do nothing")
