"""`RankMonitorClient`: the training's side of the watch, with NVIDIA's names, as the training calls it.

Signs of life are in the base class (`rank/monitoring/signs_of_life.py`), learned limits in
`rank/monitoring/limits_in_force.py`. The monitor alone judges by a limit.

Two rules protect the training: `init_workload_monitoring` alone waits for the monitor, and for a bounded time; and only
misuse is raised. Where no monitor answers, the training goes on unwatched, with a warning.

Example:

    client = RankMonitorClient()
    client.init_workload_monitoring()
    for batch in loader:
        client.start_section("step")
        train(batch)
        client.end_section("step")
    client.shutdown_workload_monitoring()

`short_forms.py` has the same in two lines.
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

_WELCOME_WAIT_S = 5.0
"""How long the training waits for its monitor's answer; then it begins without."""
_REQUEST_TIMEOUT_S = 1.0
"""How long a request to the launcher is tried: longer than a message that the next one replaces anyway."""
_DETACH_TIMEOUT_S = 0.1
"""The training is over: a monitor that does not read must not hold up its end."""
_MAX_DESCRIPTION = 4000
"""Characters: in JSON at most 24,000 bytes, which fit into one message."""

_warned_unwatched = False
"""Whether this process has warned that nobody watches it: once is enough."""


class SettingsInForce(MonitorSettings):
    """The monitor's settings as `RankMonitorClient.cfg` has them."""

    def to_yaml_file(self, cfg_path: str) -> None:
        """Writes what differs from the defaults as a file that the launcher and NVIDIA's configuration can read.

        The file is JSON, which is YAML too: our package needs no library for that.
        """
        defaults = vars(MonitorSettings())
        given = {key: value for key, value in to_json(self).items() if vars(self)[key] != defaults[key]}
        Path(cfg_path).write_text(json.dumps({"fault_tolerance": given}, indent=1) + "\n")


class RankMonitorClient(SignsOfLife):
    """The client of a training. In a process only the client that was initialised last is in use.

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
        """Whether the monitor was sent limits, and needs them again after a reconnection."""
        self._warmup_steps: int | None = None
        # `_watched`: there is a monitor. `_attached`: it was asked to watch. `_knows_limits`: it has sent its settings.
        self._watched = self._attached = self._knows_limits = False
        self._of_call = 0
        """The number of the call of a wrapped function in which this client was initialised."""
        self._saves, self._saves_by_setting = SaveSchedule(), SaveSchedule()

    @classmethod
    def call_began(cls, now_ns: int) -> None:
        """Called when an in-process wrapper calls the training's function: the function may initialise its client
        again, or go on with the one that there is."""
        RankMonitorClient._calls += 1
        if cls.active is not None:
            cls.active.begin_anew(now_ns)
            # The ranks were interrupted after different steps, so their counts differ.
            cls.active._saves, cls.active._saves_by_setting = SaveSchedule(), SaveSchedule()

    def init_workload_monitoring(
        self, num_warmup_iters: int | None = None, *, get_state_dict_cb: object = None, chkpt_manager: object = None
    ) -> None:
        """Asks the monitor to watch this training, and puts its settings in force. Blocks for up to 5 s.

        Without a launcher nothing is watched: all calls do nothing, and one warning says so.

        Args:
            num_warmup_iters: first steps that are not judged by a learned limit; None: as configured.
            get_state_dict_cb: accepted, with a warning, for code written against release 0.1 of NVIDIA's package.
            chkpt_manager: accepted for the same reason.

        Raises:
            RankMonitorClientError: the watch has begun already, in this call of a wrapped function; or
                `num_warmup_iters` is no whole number of at least 0.
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
        """Returns whether to save after this step: the same on all ranks of the default process group. Collective now
        and then (`rank/saving.py`).

        To be called after the same steps on every rank. Time is that of rank 0, and the time of a save does not count.

        Args:
            interval_s: seconds of training between two saves; None: `--ft-save-interval`, as rank 0 knows it. Without
                either, the result is always False. All ranks give an interval, or none does.

        Raises:
            RankMonitorClientError: the watch has not begun, or the interval is not above zero.
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
            Whether limits were set. Without a launcher, False.

        Raises:
            RankMonitorClientError: the watch has not begun, or a rank has not seen two signs of life.
        """
        if not self.is_initialized:
            raise not_initialized("calculate_and_set_hb_timeouts")
        if not self._watched or process.is_forked():
            return False
        return self._limits.learn_heartbeats(self._observed.longest(), skip_if_not_ready) and self._set_limits()

    calculate_and_set_timeouts = calculate_and_set_hb_timeouts
    """The name of the same method in releases 0.1 and 0.2 of NVIDIA's package."""

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
            Whether any limit was set. A section that no rank has seen is left out, with a warning. Without a launcher,
            False.

        Raises:
            RankMonitorClientError: the watch has not begun; no rank has seen anything that was asked for; or one of the
                sections is open on some rank and has never been closed on any.
        """
        if not self.is_initialized:
            raise not_initialized("calculate_and_set_section_timeouts")
        if not self._watched or process.is_forked():
            return False
        seen, opened = self._observed.longest(), tuple(self._open)
        learned = self._limits.learn_sections(seen, opened, selected_sections, calc_out_of_section, skip_if_not_ready)
        return learned and self._set_limits()

    def state_dict(self) -> dict[str, Any]:
        """Returns the learned limits as JSON values, to be saved with the checkpoint; the same on every rank."""
        return self._limits.now.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the limits in force that another run has learned. Other limits stay as they are. May be called before
        `init_workload_monitoring` too.

        An invalid state, of another version for example, is ignored with a warning: the training goes on.

        Raises:
            RankMonitorClientError: `state` is no mapping.
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
        """Asks the launcher to restart, to exclude this node, or to end the job. Blocks for up to 1 s.

        Returns when the request is sent; the launcher then ends the ranks. One rank is enough to ask.

        Raises:
            RankMonitorClientError: the watch has not begun.
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
        """Returns an empty state, as NVIDIA's monitor does at a first start. Part of release 0.1 of NVIDIA's package.

        Our monitor keeps no state of the training. Callers then load the checkpoint on disk.
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
        """Returns the whole state of this training for a monitor that knows nothing: messages, hello first.

        A message carries the moment since which it holds, so that what is sent again is no new sign of life.
        """
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
        if seen.got_first_sign:
            sections = Sections(tuple(opened.items()), self.iteration)
            if opened:
                messages.append((sections, seen.last_sign_ns))
            else:
                messages.append((sections, seen.out_since_ns))
        return messages

    def disconnect(self) -> None:
        """Makes every further call do nothing: another client is in use now, or this is a forked child. Called by the
        link."""
        self._link = None

    # Within.

    def _attach(self, link: Link) -> MonitorSettings | None:
        """Asks the monitor to watch. Returns its settings; None: it has not answered, or has refused this process."""
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
        """Puts the settings in force, and sends the limits that were loaded before."""
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
        """Sends the limits in force to the monitor. Returns True.

        Sends nothing where the monitor has not sent its settings: limits that were configured there would be replaced
        by defaults from here.
        """
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
    """Returns a number of steps, of any integer type. Raises RankMonitorClientError: it is none."""
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
    """Warns, once in a process, that there is no monitor. Not in forked children, such as workers of a data loader."""
    global _warned_unwatched
    if not _warned_unwatched and not process.is_forked():
        _warned_unwatched = True
        logger.warning("not started by ft_launcher: nobody watches this process, monitoring calls do nothing")
