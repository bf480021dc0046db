"""Builds the environment of a rank beyond torch's own: its monitor, the job's tag, limits, NCCL, its GPUs. Pure.

Called by `agent/ranks.py` for each cycle, by `agent/single_node.py` after a suspect result, and by
`commands/dry_run.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ft_launcher.health.visible_devices import visible
from ft_launcher.ranks import nccl
from ft_launcher.record.cycle_files import current_info
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import Settings
from rank_monitor.contract.wire.messages import ResultInDoubt

_UNBUFFERED = "PYTHONUNBUFFERED"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# A rank names its device as `cuda:UUID`; the driver's UUIDs begin with `GPU-`.
_TORCHS, _DRIVERS = "cuda:", "GPU-"


@dataclass(frozen=True)
class Relocation:
    """Why the ranks of a cycle run on other hardware than before (`result` None: they do not), and which GPUs they see.

    `visible` is a value of CUDA_VISIBLE_DEVICES; empty: the launcher's own.
    """

    result: ResultInDoubt | None = None
    visible: str = ""


def rank_environment(
    tag: str, cycle: int, monitor_socket: Path, stack_file: Path, stack_signal: int, recorder_socket: str = ""
) -> dict[str, str]:
    """Returns the variables of one rank.

    Args:
        tag: of the job; a stop finds all its processes by this.
        recorder_socket: where torch's worker server of the rank is to listen; empty: nowhere.
    """
    variables = {
        env.JOB_TAG: tag,
        env.CYCLE: str(cycle),
        env.RANK_MONITOR_SOCKET: str(monitor_socket),
        env.STACK_FILE: str(stack_file),
        env.STACK_SIGNAL: str(int(stack_signal)),
    }
    if recorder_socket:
        variables[env.FLIGHT_RECORDER_SOCKET] = recorder_socket
    return variables


def cycle_environment(
    settings: Settings,
    environ: Mapping[str, str],
    is_program: bool,
    multipliers: Mapping[str, float],
    relocation: Relocation,
) -> dict[str, str]:
    """Returns the variables that all ranks of a cycle get.

    Args:
        environ: the launcher's own environment, which the ranks have too.
        is_program: the ranks are no Python scripts that we start (`--no-python`).
        multipliers: learned limit -> factor, after a kill by that limit.
        relocation: to other hardware, and why.

    Raises:
        ConfigError: as `nccl.variables`.
    """
    # By these a rank's bootstrap applies the options. One that would only say the default is left out, unless the
    # launcher's own must be overridden.
    options = {env.ALIAS_NVRX: str(int(settings.start.alias_nvrx)), env.INJECT: ";".join(settings.start.inject)}
    variables = {name: text for name, text in options.items() if text not in ("", "0") or name in environ}
    info = current_info(settings.record, environ)
    if info is not None:
        variables[env.CURRENT_CYCLE_INFO] = str(info)
    # A program that is Python prints each line at once, unless the user decides it. Into a file it writes 8 KiB at a
    # time: what such a rank printed would be read minutes later, and `--ft-watch-log-timeout` could end it although it
    # trains. Our own ranks run as `python -u` anyhow.
    if is_program and settings.record.watch_log is not None and _UNBUFFERED not in environ:
        variables[_UNBUFFERED] = "1"
    variables |= nccl.variables(settings.nccl, environ)
    if multipliers:
        variables[env.LIMIT_MULTIPLIERS] = json.dumps(dict(multipliers))
    if relocation.result is not None:
        variables[env.RESULT_IN_DOUBT] = json.dumps(asdict(relocation.result))
    if relocation.visible:
        variables[_VISIBLE] = relocation.visible
    return variables


def another_device(
    result: ResultInDoubt | None,
    ranks: int,
    environ: Mapping[str, str],
    uuids: Sequence[str | None],
    former: Relocation,
) -> Relocation | None:
    """Returns which GPUs `ranks` ranks are to see because of `result`; None: no doubt, or no other device here.

    Among several nodes `nodes/formation.py` moves the ranks instead. With more GPUs than ranks the suspect one is left
    out. Otherwise each rank gets the next one, so that the suspect rank computes on another device while all are in
    use. A node whose GPUs have no known UUIDs has no other device.

    Args:
        environ: the launcher's own environment.
        uuids: of every GPU of the node, as the driver spells them (`GPU-...`); None: not known.
        former: how they run now.
    """
    if result is None:
        return None
    indices, _ = visible(former.visible or environ.get(_VISIBLE), uuids)
    named = (uuids[index] for index in indices)
    shown = [uuid for uuid in named if uuid is not None]
    suspect = _DRIVERS + result.device.removeprefix(_TORCHS).removeprefix(_DRIVERS)
    # With one GPU a rotation gives each rank the device that it had.
    if suspect not in shown or len(shown) < max(2, ranks):
        return None
    moved = [uuid for uuid in shown if uuid != suspect]
    if len(moved) < ranks:
        moved = shown[1:] + shown[:1]
    return Relocation(result, ",".join(moved))
