"""All settings, grouped by concern, with their units and defaults. The only file that holds their defaults.

A setting is one field: its default, its kind (`kinds.py`), its help text, and, where it is accepted and does nothing,
what is done instead. The options and their spellings are in `ft_launcher/settings/options.py`; where values come from,
and which one wins, in `ft_launcher/settings/sources.py`. Durations are seconds.

The launcher holds a whole `Settings`. A monitor gets `MonitorSettings` when it starts, and passes them on to its rank.
Of the other groups a rank gets single values through its environment, where it needs them.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection
from dataclasses import dataclass

from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.rounds.escalation import EscalationLimits, LimitsSet
from rank_monitor.contract.settings import injection, kinds, log_pattern
from rank_monitor.contract.settings.declaration import setting


@dataclass(frozen=True)
class MonitorSettings:
    """Limits of the monitor of a rank, and what the monitor does when one is exceeded. The rank gets them with the
    answer to its first request (`Welcome`)."""

    # Both limits, the check interval and the safety factor have NVIDIA's defaults: a job that moves here keeps them.
    initial_rank_heartbeat_timeout: float | None = setting(
        3600.0, kinds.LIMIT, "from the rank's connection to its first sign of life"
    )
    rank_heartbeat_timeout: float | None = setting(2700.0, kinds.LIMIT, "between two signs of life")
    rank_section_timeouts: dict[str, float | None] = setting(
        {}, kinds.SECTIONS, "limit of each section while it is open"
    )
    rank_out_of_section_timeout: float | None = setting(None, kinds.LIMIT, "longest time with no section open")
    connect_timeout: float | None = setting(None, kinds.LIMIT, "from the start of a rank to init_workload_monitoring()")
    workload_check_interval: float = setting(
        5.0, kinds.SECONDS, "between two looks at the limits", "the monitor wakes at the exact deadline"
    )
    safety_factor: float = setting(5.0, kinds.FACTOR, "a learned limit is the longest time observed times this")
    # Without a floor the limit of a quick training is a fraction of a second, and any pause ends it.
    learned_limit_floor: float = setting(10.0, kinds.SECONDS, "no learned limit goes below")
    num_warmup_iterations: int = setting(
        5, kinds.COUNT, "first steps: judged by section `warmup`, never by a learned `step` limit"
    )
    rank_termination_signal: int = setting(signal.SIGKILL, kinds.SIGNAL, "what a hung rank gets, after SIGCONT")
    termination_grace_time: float = setting(5.0, kinds.SECONDS, "from that signal to SIGKILL")
    dump_stacks: bool = setting(True, kinds.BOOLEAN, "write the stacks of a hung rank before it dies")
    flight_recorder: str = setting(
        "auto",
        kinds.choice("auto", "off"),
        "ask torch's flight recorder, and NCCL's RAS, at a hang which rank the others wait for",
    )
    hang_timeout: float | None = setting(
        None,
        kinds.LIMIT,
        "longest time that ranks wait in a collective for another, or that a rank does nothing while nobody waits",
    )
    # Longer than a step and a save of most trainings take; where collectives are rarer, the warning comes later.
    stall_warning: float | None = setting(
        60.0,
        kinds.LIMIT,
        "a main thread that stands still this long, and 20 times as long as usual, is reported; no kill",
    )
    watch_log_timeout: float | None = setting(
        None, kinds.LIMIT, "with watch_log: longest time from one step in a rank's output to the next"
    )
    unwatched_warning: float | None = setting(
        60.0,
        kinds.LIMIT,
        "limits given, and no init_workload_monitoring() this long after the process group: a warning",
    )
    save_interval: float | str | None = setting(
        None,
        kinds.SAVE_INTERVAL,
        "time of training between two checkpoints, where the training asks ft.should_save(); auto: as often as pays",
    )
    oversleep_slack: float = setting(
        1.0, kinds.SECONDS, "a monitor that overslept by more shifts its deadlines (a paused machine must not kill)"
    )
    teardown_timeout: float | None = setting(
        None, kinds.LIMIT, "from shutdown_workload_monitoring() to the rank's exit"
    )
    interrupt_grace: float | None = setting(
        None,
        kinds.LIMIT,
        "how long the cleanup of a function restarted in process may take; none: half of hard_timeout - soft_timeout",
    )
    # faulthandler takes the signal for itself; programs and libraries use the signals with names.
    stack_signal: int = setting(
        kinds.SIGNAL.read("SIGRTMIN+7"),
        kinds.SIGNAL,
        "asks a rank for its stacks if it does not answer; one that nobody else uses",
    )
    log_level: str = setting("INFO", kinds.LOG_LEVEL, "level of our own log lines")

    @property
    def stamp_period(self) -> float:
        """The longest time in seconds from one stamp of a rank's main thread to the next that these limits allow.

        A stall is seen with a quarter of its limit to spare. The limit of a hang counts from the last stamp, so its
        period is a twentieth of it: by so much later than its limit a hang may end.
        """
        periods = [math.inf]
        if self.stall_warning is not None:
            periods.append(self.stall_warning / 4)
        if self.hang_timeout is not None:
            periods.append(self.hang_timeout / 20)
        return min(periods)


@dataclass(frozen=True)
class StartSettings:
    """How ranks start: as forks or by exec, with which modules, and with which faults on purpose."""

    warm_start: str = setting("auto", kinds.choice("auto", "on", "off"), "ranks as forks of one import of torch")
    preload: tuple[str, ...] = setting(
        (kinds.AUTO,),
        kinds.PRELOAD,
        "modules imported before the ranks fork; auto: what the ranks of the first cycle import; names are added",
    )
    inprocess: str = setting(
        "auto", kinds.choice("auto", "off"), "ranks with an in-process wrapper restart in process first"
    )
    rejoin: str = setting(
        "true",
        kinds.REJOIN,
        "a rank that died in process is started again, and joins at the next restart; now: at once",
    )
    port_range: tuple[int, int] | None = setting(None, kinds.PORTS, "where the ports of ours may be")
    dry_run: bool = setting(False, kinds.BOOLEAN, "print command, environment, limits of each rank; start nothing")
    alias_nvrx: bool = setting(False, kinds.BOOLEAN, "nvidia_resiliency_ext imports resolve to ours")
    inject: tuple[str, ...] = setting(
        (), injection.SETTING, "a fault to inject into a rank on purpose; may be given again"
    )

    @property
    def preloaded(self) -> tuple[str, ...]:
        """The modules that `preload` names."""
        return tuple(name for name in self.preload if name not in (kinds.AUTO, kinds.NONE))

    @property
    def learns_modules(self) -> bool:
        """Whether modules that ranks were seen to import are preloaded for the ranks of the next cycle."""
        return kinds.NONE not in self.preload


@dataclass(frozen=True)
class StopSettings:
    """How ranks end: at the end of a cycle, at a preemption, and what is waited for after that."""

    workers_stop_timeout: float = setting(
        15.0, kinds.SECONDS, "SIGTERM to SIGKILL at the end of a cycle; how long a rank that has raised may do nothing"
    )
    preemption_signal: int = setting(
        signal.SIGTERM, kinds.SIGNAL, "what ranks with a handler for it get when the launcher gets SIGTERM or SIGHUP"
    )
    preemption_grace: float = setting(60.0, kinds.SECONDS, "how long they have then")
    # A code of its own, so that a batch script can submit the job again; see docs/exit_codes.md.
    preempted_exit_code: int = setting(
        86, kinds.EXIT_CODE, "the launcher's code when they ended by themselves; 0 under --ft-alias-nvrx"
    )
    linger: float | None = setting(
        30.0,
        kinds.SECONDS_OR_NONE,
        "how long background processes of successful ranks, in sessions of their own, may go on, and a rank that has "
        "raised and still works; none: for ever. The state in memory has another option: --ft-memory-linger",
    )
    exit_barrier_timeout: float = setting(
        300.0,
        kinds.SECONDS,
        "wait for the other nodes at the end; where the ranks' store is hosted: since the last rank of any node ended",
    )
    gpu_memory_reclaim_timeout: float = setting(50.0, kinds.SECONDS, "longest wait for GPU memory; 0: none")
    gpu_memory_tolerance_mb: float = setting(512.0, kinds.AMOUNT, "MiB more than at the start that may stay in use")
    gpu_memory_poll_interval: float = setting(2.0, kinds.SECONDS, "longest time between two readings of it")


@dataclass(frozen=True)
class RestartSettings:
    """When to restart, and when to stop restarting: by cycles of the launcher, and in process."""

    restart_policy: str = setting("any-failed", kinds.choice("any-failed", "min-healthy"), "what ends a cycle")
    restart_window: float | None = setting(None, kinds.LIMIT, "--max-restarts counts within this many seconds")
    backoff: tuple[float, float] = setting((0.0, 0.0), kinds.BACKOFF, "wait before a restart when cycles die young")
    same_error_limit: int = setting(3, kinds.COUNT, "times that the same error in a row ends the restarts; 0: never")
    max_no_progress_cycles: int = setting(3, kinds.COUNT, "cycles without progress before giving up; 0: never")
    max_no_progress_restarts: int = setting(
        10, kinds.COUNT, "restarts in process without progress, in a row, before fresh ranks; 0: never"
    )
    soft_timeout_limit: int = setting(
        3, kinds.COUNT, "hangs right after a restart in process, in a row, before fresh ranks; 0: never"
    )
    min_progress_iterations: int = setting(1, kinds.COUNT, "iterations that count as progress")
    checkpoint_iteration_file: str | None = setting(
        None, kinds.PATH_OR_NONE, "file that holds the last saved iteration, which then measures progress"
    )
    no_restart_exit_codes: tuple[int, ...] = setting((), kinds.CODES, "exit codes of ranks that end the job")
    no_restart_exit_code: int = setting(93, kinds.EXIT_CODE, "the launcher's code then")
    exit_code: str = setting("ranks", kinds.choice("ranks", "one"), "pass on the ranks' code, or 1")

    @property
    def in_process_limits(self) -> EscalationLimits:
        """The limits after which restarts in process end."""
        return EscalationLimits(**{name: getattr(self, key) for name, key in OF_IN_PROCESS.items()})

    def in_process_limits_set(self, keys: Collection[str]) -> LimitsSet:
        """Returns those of these limits that the user has set. `keys`: of all settings that the user has set."""
        return LimitsSet(**{name: getattr(self, key) for name, key in OF_IN_PROCESS.items() if key in keys})


OF_IN_PROCESS = {
    "same_error": "same_error_limit",
    "no_progress": "max_no_progress_restarts",
    "soft_timeouts": "soft_timeout_limit",
    "least_progress": "min_progress_iterations",
}
"""Field of `EscalationLimits` -> the setting for it."""


@dataclass(frozen=True)
class MemberSettings:
    """Which nodes take part in a cycle, and when a silent node is lost."""

    spares: int = setting(0, kinds.COUNT, "nodes that wait")
    scale: str = setting("both", kinds.choice("up", "down", "both", "off"), "may the world grow or shrink")
    segment: int | None = setting(None, kinds.COUNT_OR_NONE, "nodes kept together")
    node_group: str | None = setting(None, kinds.TEXT_OR_NONE, "this node's group")
    job_secret_file: str | None = setting(
        None,
        kinds.PATH_OR_NONE,
        "file with a secret, the same on all nodes, by which they know each other where they exchange states in memory",
    )
    node_beat: float = setting(2.0, kinds.SECONDS, "period of a node's beat")
    # The two earlier moments are those of `beat_schedule.own_limit_s` and `lease_s`.
    node_timeout: float = setting(
        15.0,
        kinds.SECONDS,
        "a silent node is lost after; its ranks are ended before, with the defaults when its launcher had no answer of "
        "the store for 11 s or stood still for 11.5 s",
    )


@dataclass(frozen=True)
class HealthSettings:
    """Checks of the node, before a cycle and while one runs. Each check is a process of its own, with a deadline."""

    health: str = setting("auto", kinds.choice("auto", "off"), "checks of the node before a cycle")
    node_check: str | None = setting(None, kinds.TEXT_OR_NONE, "command that must exit 0")
    node_health_check_endpoint: str | None = setting(None, kinds.TEXT_OR_NONE, "of a checker: gRPC, or line:///path")
    storage_health_check_path: tuple[str, ...] = setting((), kinds.TEXTS, "paths that must answer")
    health_timeout: float = setting(30.0, kinds.SECONDS, "deadline of each check")
    node_health_check_interval: float | None = setting(
        None, kinds.LIMIT, "repeat the checks while ranks run, this long after the last ones; none: only before a cycle"
    )
    enable_nic_monitor: bool = setting(
        False, kinds.BOOLEAN, "read the NICs while ranks run, every 5 s or at node_health_check_interval"
    )
    enable_nic_healthcheck: bool = setting(True, kinds.BOOLEAN, "check the NICs before a cycle")
    enable_gpu_health_check: bool = setting(True, kinds.BOOLEAN, "check the GPUs before a cycle")
    enable_dist_storage_healthcheck: bool = setting(False, kinds.BOOLEAN, "check network mounts")
    pci_topo_file: str | None = setting(None, kinds.PATH_OR_NONE, "map of GPU to NIC")
    link_down_path_template: str | None = setting(None, kinds.TEXT_OR_NONE, "counter, with {nic}")
    link_state_path_template: str | None = setting(None, kinds.TEXT_OR_NONE, "state, with {nic}")
    check_remaining_processes: bool = setting(
        False, kinds.BOOLEAN, "before a cycle, warn of processes of others that use a GPU of the ranks"
    )
    numa_bind_strict: bool = setting(
        False,
        kinds.BOOLEAN,
        "an impossible binding is an error",
        "a binding that --numa-binding asks for and torch cannot make is always an error",
    )


@dataclass(frozen=True)
class NcclSettings:
    """NCCL's timeouts in the ranks, set through the variables of torch and NCCL. A variable that the user has set
    wins."""

    nccl_collective_timeout: float | None = setting(
        None, kinds.LIMIT, "timeout of process groups that are made without one; none: torch's"
    )
    # Flyte's default for its option of this name.
    nccl_heartbeat_timeout: float | None = setting(
        300.0, kinds.LIMIT, "from a collective's timeout to the end of a rank that hangs in its abort; none: torch's"
    )
    nccl_async_error_handling: int | None = setting(
        None, kinds.NCCL_MODE, "what torch does at a failed collective; true: 1, end the rank; none, false: torch's"
    )
    nccl_enable_monitoring: bool = setting(True, kinds.BOOLEAN, "torch's thread that watches its NCCL watchdog")


@dataclass(frozen=True)
class MemorySettings:
    """The training's state in this node's memory: how often, how much, where, and for how long after a death."""

    memory_interval: int | str | None = setting(
        kinds.AUTO,
        kinds.MEMORY_INTERVAL,
        "steps from one save in memory to the next, once the training makes ft.MemoryCheckpoint; auto: so that saves "
        "cost about 1 % of the time; none: no saves",
    )
    # Two: the older one is there while the newer one is being written.
    memory_keep: int = setting(2, kinds.COUNT_ABOVE_ZERO, "generations (steps that all ranks have saved) in memory")
    memory_dir: str = setting("/dev/shm", kinds.PATH, "tmpfs that the state in memory lies in")
    memory_limit: int | None = setting(
        None,
        kinds.BYTES_OR_NONE,
        "most that the state in memory of this node may take; none: 40 % of the smaller one of the tmpfs and the "
        "memory that this launcher's cgroup allows",
    )
    # A batch script, a scheduler or a container's restart has started the launcher again by then.
    memory_linger: float = setting(
        600.0,
        kinds.SECONDS,
        "how long the state in memory outlives a launcher that was killed, for the next start of the same job; 0: such "
        "a start begins afresh. Background processes of ranks have another option: --ft-linger",
    )
    memory_flush: str | None = setting(
        None,
        kinds.PATH_OR_NONE,
        "folder on a disk or on shared storage to which the newest states in memory are written when the job gives up "
        "or gets a signal to end, for the next start of the same job",
    )
    memory_buddies: int = setting(
        0,
        kinds.COUNT,
        "on how many other nodes each node's state in memory is copied, of another --ft-node-group where there is one; "
        "a node that takes a lost one's place fetches its state from there",
    )
    # A tenth of a network of 40 Gbit/s, and half of what one core adds to a checksum.
    memory_bandwidth: int = setting(
        500_000_000, kinds.BYTES, "bytes a second with which a node sends its state to others"
    )


@dataclass(frozen=True)
class RecordSettings:
    """Journal, logs and status: what is written, and where."""

    job_name: str | None = setting(
        None,
        kinds.TEXT_OR_NONE,
        "name of the job in status, page, metrics and log folder; default: made of the script's",
    )
    journal_dir: str | None = setting(None, kinds.PATH_OR_NONE, "folder of the journal; default: the log folder")
    # Four times what ranks may report in an attempt; at a line of 1 KiB every 5 s, two weeks.
    journal_max_mb: float | None = setting(
        256.0, kinds.LIMIT_MB, "MiB after which the journal begins a new file; at most three are kept"
    )
    watch_log: str | None = setting(
        None,
        log_pattern.SETTING,
        f"take steps from what ranks print: {', '.join(log_pattern.PRESETS)}, or a regular expression with the named "
        f"groups {', '.join(log_pattern.GROUPS)}",
    )
    watch_log_nan: str = setting(
        "warn", kinds.choice("warn", "fault", "off"), "with watch_log: what a loss of nan or inf is"
    )
    metrics_port: int | None = setting(None, kinds.PORT_OR_OFF, "port of /metrics for Prometheus, /healthz and /readyz")
    status_port: int | None = setting(
        None, kinds.PORT_OR_OFF, "port of the page, /status.json and /events beside these"
    )
    status_address: str = setting(
        "127.0.0.1", kinds.TEXT_OR_NONE, "address of both; beyond this host with a token only"
    )
    status_token_file: str | None = setting(
        None, kinds.PATH_OR_NONE, "file with the token of requests (Authorization: Bearer TOKEN)"
    )
    otel_traces: bool = setting(
        False, kinds.BOOLEAN, "send each cycle as a trace by OTLP, to where OpenTelemetry's own variables say"
    )
    log_group_access: bool = setting(
        False, kinds.BOOLEAN, "the group may read journal and logs: 0640 in 0750, not 0600 in 0700"
    )
    nvrx_logfile: str | None = setting(None, kinds.PATH_OR_NONE, "copy of the launcher's own log")
    cycle_info_dir: str | None = setting(None, kinds.PATH_OR_NONE, "folder of a JSON file per cycle, as NVIDIA's")
    cycle_info_job_id: str | None = setting(None, kinds.TEXT_OR_NONE, "the job in their names; default: Slurm's id")
    per_cycle_applog_prefix: str | None = setting(
        None, kinds.PATH_OR_NONE, "what ranks print goes to PREFIX_cycleN.log, of all nodes, instead of the console"
    )
    install_exception_hook: bool = setting(
        True, kinds.BOOLEAN, "report uncaught exceptions of ranks", "these are always reported to the monitor"
    )


@dataclass(frozen=True)
class SourceSettings:
    """Where the other settings come from."""

    cfg_path: str | None = setting(None, kinds.PATH_OR_NONE, "YAML with a mapping named fault_tolerance")
    ignore_missing_cfg: bool = setting(False, kinds.BOOLEAN, "go on without that file, or without that mapping in it")
    allow_unknown_keys: bool = setting(False, kinds.BOOLEAN, "an unknown key in the YAML is a warning, not an error")


PREEMPTED_UNDER_ALIAS = 0
"""The default of `preempted_exit_code` with `alias_nvrx`: loops that were written for NVIDIA's launcher take any other
code for a failure."""
PRELOAD_UNDER_ALIAS = (kinds.NONE,)
"""The default of `preload` with `alias_nvrx`: ranks under NVIDIA's launcher import everything by themselves."""

GROUPS: dict[str, type] = {
    "monitor": MonitorSettings,
    "start": StartSettings,
    "stop": StopSettings,
    "restart": RestartSettings,
    "members": MemberSettings,
    "health": HealthSettings,
    "nccl": NcclSettings,
    "memory": MemorySettings,
    "record": RecordSettings,
    "source": SourceSettings,
}
"""Attribute of `Settings` -> its group. Keys are unique over all groups."""


@dataclass(frozen=True)
class Settings:
    """All settings of a job on one node. A value is complete and checked; it never changes."""

    monitor: MonitorSettings = MonitorSettings()
    start: StartSettings = StartSettings()
    stop: StopSettings = StopSettings()
    restart: RestartSettings = RestartSettings()
    members: MemberSettings = MemberSettings()
    health: HealthSettings = HealthSettings()
    nccl: NcclSettings = NcclSettings()
    memory: MemorySettings = MemorySettings()
    record: RecordSettings = RecordSettings()
    source: SourceSettings = SourceSettings()

    def __post_init__(self) -> None:
        """Checks the relations between settings.

        Raises:
            ConfigError: two settings contradict each other. The text names both.
        """
        beat, timeout = self.members.node_beat, self.members.node_timeout
        if beat >= timeout:
            raise ConfigError("node_beat", beat, "settings", f"must be below node_timeout={timeout}")
        if self.monitor.watch_log_timeout is not None and self.record.watch_log is None:
            problem = "needs watch_log, which says what a step looks like in the ranks' output"
            raise ConfigError("watch_log_timeout", self.monitor.watch_log_timeout, "settings", problem)
        preempts = self.stop.preemption_signal
        if preempts in {signal.SIGKILL, signal.SIGSTOP}:
            name = kinds.signal_name(preempts)
            raise ConfigError("preemption_signal", name, "settings", "cannot be caught by a rank", "SIGTERM can")
        asks_for_stacks = self.monitor.stack_signal
        if asks_for_stacks in {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, self.stop.preemption_signal}:
            problem = "must be a signal that a process can handle, and not preemption_signal"
            raise ConfigError("stack_signal", asks_for_stacks, "settings", problem, "SIGRTMIN+7 is free everywhere")
