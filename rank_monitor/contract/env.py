"""Names of our own environment variables, and of those of others that we set.

All other files take the names from here, and a test checks that. Variables of torch, NCCL and Slurm are spelled where
they are read. The values are texts; who writes and who reads each is said below.
"""

from __future__ import annotations

# Set by the launcher for each rank.
RANK_MONITOR_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
"""Path of the socket of the rank's monitor; the client connects there. Without it nothing is watched."""
LAUNCHER_SOCKET = "FT_LAUNCHER_IPC_SOCKET"
JOB_TAG = "FT_JOB_TAG"
"""Marks every process of a job, children of ranks too: by it they are found and killed (`processes/sweep.py`)."""
CYCLE = "FT_CYCLE"
"""Number of the cycle that the rank belongs to."""
STACK_FILE = "FT_STACK_FILE"
"""The file to which the rank appends its stacks when its monitor asks for them."""
STACK_SIGNAL = "FT_STACK_SIGNAL"
"""The signal on which it does so where it does not answer the question."""
FLIGHT_RECORDER_SOCKET = "FT_FLIGHT_RECORDER_SOCKET"
"""Path at which torch's worker server of the rank is to listen (`rank/start/after_import.py`)."""
LIMIT_MULTIPLIERS = "FT_LIMIT_MULTIPLIERS"
"""JSON: name of a learned limit that ended a cycle -> factor by which the client multiplies it in this cycle."""
DEBUG = "FT_DEBUG"
RESULT_IN_DOUBT = "FT_RESULT_IN_DOUBT"
"""JSON of `ResultInDoubt`: why the ranks were moved, and where the suspect one ran before."""
IN_PROCESS_LIMITS = "FT_IN_PROCESS_LIMITS"
"""JSON of `escalation.LimitsSet`: the limits of restarts in process that the launcher's user has set."""
SAVE_INTERVAL = "FT_CHOSEN_SAVE_INTERVAL"
"""Seconds between two saves, as the launcher of this node chose them for this cycle (`--ft-save-interval auto`)."""
MEMORY_FILES = "FT_MEMORY_FILES"
"""JSON of `memory_files.MemoryFiles`: where the ranks of this node write the training's state, and within which bounds.
Without it no state is kept in memory."""
REJOIN = "FT_REJOIN"
"""Set for a rank that was started again alone: its wrapper joins the others at their next restart."""

CURRENT_CYCLE_INFO = "NVRX_CURRENT_CYCLE_INFO"
"""NVIDIA's name: the link to the JSON file about the cycle that runs."""

CYCLE_STORE = "FT_CYCLE_STORE"
"""Host and port of the launcher's store, where the ranks use another one (TORCH_DISABLE_SHARE_RDZV_TCP_STORE)."""

NCCL_COLLECTIVE_TIMEOUT = "FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC"
"""Flyte's name, with its meaning: the default timeout of process groups in a rank, in seconds."""

SIDECAR_OF = "FT_SIDECAR_OF"
"""Set by the launcher for its template and monitors: the tag of their job. They must not have `JOB_TAG` itself, since
they kill what has it."""

# Read by the launcher.
# torch reads an option from PET_<NAME>; the second is the name that NVIDIA's launcher reads.
CFG_PATH_SPELLINGS = ("PET_FT_CFG_PATH", "FAULT_TOL_CFG_PATH", "FT_CFG_PATH")
SETTING_PREFIX = "FT_"
FINISHED_FLAG_FILE = "FAULT_TOL_FINISHED_FLAG_FILE"
SIMULATED_FAULT = "FT_SIM_FAULT_DESC"
INJECT = "FT_INJECT"
AS_TORCHRUN = "FT_AS_TORCHRUN"
"""True: programs that call torch's launcher get this one (`ft_launcher/torchrun_hook.py`). Set by the user."""
ALIAS_NVRX = "FT_ALIAS_NVRX"

SET_FOR_RANKS = frozenset(
    {
        RANK_MONITOR_SOCKET,
        LAUNCHER_SOCKET,
        JOB_TAG,
        CYCLE,
        CYCLE_STORE,
        STACK_FILE,
        FLIGHT_RECORDER_SOCKET,
        LIMIT_MULTIPLIERS,
        RESULT_IN_DOUBT,
        IN_PROCESS_LIMITS,
        SAVE_INTERVAL,
        MEMORY_FILES,
        REJOIN,
    },
)
"""Variables with our prefix that are not settings; a launcher started inside a rank drops them."""

NOT_SETTINGS = SET_FOR_RANKS | {SIMULATED_FAULT, DEBUG, *CFG_PATH_SPELLINGS}
"""Variables with our prefix about which no "unknown setting" warning is given."""


def of_setting(key: str) -> str:
    """Returns the variable that sets `key`, the underscored name of a setting: `FT_<KEY>`."""
    return SETTING_PREFIX + key.upper()
