"""The table of scenarios, in the order in which they run. What is measured, and how, stands in the modules it names."""

from __future__ import annotations

from functools import partial

from rank_monitor.contract.settings.config import MemberSettings

from . import (
    floors,
    formation,
    guilty_rank,
    in_process,
    one_node,
    report_of_journals,
    several_nodes,
    state_in_memory,
    status_page,
    training_cost,
)
from .launchers import (
    DCP,
    DCP_ASYNC,
    DCP_SHM,
    LM_RESILIENCY,
    NVRX,
    NVRX_ALONE,
    NVRX_QUICK,
    OURS,
    OURS_ALONE,
    OURS_EXEC,
    OURS_MEMORY,
    OURS_OVERLAP,
    OURS_WRAPPED,
    TORCH_SAVE,
    TORCHRUN,
    TORCHRUN_OWN_STORE,
)
from .scenario import Scenario

ONLY_OURS = {"ours": [OURS]}
WITH_MONITOR = {"ours": [OURS], "nvrx": [NVRX]}
WRAPPERS = {"ours": [OURS_WRAPPED, OURS_ALONE], "nvrx": [NVRX_ALONE]}
SEVERAL_NODES = {"ours": [OURS], "torchrun": [TORCHRUN_OWN_STORE]}
WAYS = {
    "ours": [OURS_MEMORY, OURS_OVERLAP],
    "torchrun": [DCP, DCP_ASYNC, DCP_SHM, TORCH_SAVE],
    "lm-resiliency": [LM_RESILIENCY],
}
"""The ways to keep a state; torch's own stand for its launcher."""
EVERY = {"ours": [OURS], "torchrun": [TORCHRUN], "nvrx": [NVRX]}
DEFAULT = MemberSettings()
LOSS = "loss of a node to all {}ready, minus {} --ft-node-timeout of {:g} s; 2 agents: 1:2, 3 agents: a spare"

SCENARIOS = (
    Scenario(
        keys=("P1", "P1b"),
        title="launch to the last group ready; last rank's death to launcher's end",
        marks="1.35 x import torch + 0.3 s; exit below 0.1 s",
        sizes=(1, 2, 8),
        once=one_node.launch,
        floor=floors.launch,
        variants=EVERY,
    ),
    Scenario(
        keys=("P1c",),
        title="idle ranks: memory of all, private memory of a rank, CPU of the launcher",
        marks="half of exec's memory at 8 ranks, private not above exec's; CPU below 0.2 % of a core",
        sizes=(8,),
        once=one_node.idle,
        floor=floors.idle,
        variants=EVERY | {"ours": [OURS, OURS_EXEC]},
    ),
    Scenario(
        keys=("P2",),
        title="a rank's SIGKILL to all ranks' group ready",
        marks="p50 below 0.1 / 0.15 s at 2 / 8, all recovered",
        sizes=(2, 8),
        once=one_node.crashes,
        floor=floors.crash,
        variants=EVERY | {"torchrun": [TORCHRUN, TORCHRUN_OWN_STORE]},
        trials=one_node.CRASHES,
    ),
    Scenario(
        keys=("P2b",),
        title="a rank's SIGKILL to the first step of a DDP model on all ranks, from the first fault after learning",
        marks="p50 below 0.15 / 0.4 s at 2 / 8, at least 10 / 18 times faster than torchrun",
        sizes=(2, 8),
        once=one_node.first_steps,
        floor=floors.nothing,
        variants={"ours": [OURS], "torchrun": [TORCHRUN_OWN_STORE]},
        trials=one_node.CRASHES,
    ),
    Scenario(
        keys=("P5",),
        title="hang: last sign of life to signal and death, minus the limit",
        marks="signal within 5 ms p99, dead within 30 ms",
        sizes=(1,),
        once=one_node.hang,
        floor=floors.hang,
        variants=WITH_MONITOR | {"nvrx": [NVRX, NVRX_QUICK]},
    ),
    Scenario(
        keys=("P6",),
        title="cost of send_heartbeat and of start_section + end_section",
        marks="4 / 9 us p50, p99 below 30 us, the same with the monitor stopped",
        sizes=(1, 8),
        once=training_cost.calls,
        floor=floors.calls,
        variants=WITH_MONITOR,
    ),
    Scenario(
        keys=("P7",),
        title="sidecars at 10 heartbeats a second (each), and launcher with sidecars (all)",
        marks="4 MiB PSS, 2 private, 0.05 s CPU a minute each; all below torchrun alone",
        sizes=(8,),
        once=one_node.sidecars,
        floor=floors.sidecars,
        variants=EVERY,
    ),
    Scenario(
        keys=("P8",),
        title="in process: an exception on one rank to the function called again on all",
        marks="last_call_wait 0: below 30 / 50 / 80 ms at 2 / 4 / 8, gloo 150 ms at 8;"
        " the first step of a DDP model: gloo and one more such step; defaults: last_call_wait + 60 ms",
        sizes=(2, 4, 8),
        once=in_process.restarts,
        floor=floors.restart,
        variants=WRAPPERS,
        trials=in_process.RESTARTS,
    ),
    Scenario(
        keys=("P9",),
        title="in process: a wrapped function while nothing happens",
        marks="at most 0.05 requests per second and rank at 64, 2 threads, no process under the launcher; entry 0.1 s",
        sizes=(8, 64),
        once=in_process.steady,
        floor=floors.nothing,
        variants=WRAPPERS,
    ),
    Scenario(
        keys=("P10",),
        title=f"restart with a rank that ignores SIGTERM, minus the configured {one_node.STOP_S:g} s",
        marks="below 0.2 s",
        sizes=(2,),
        once=one_node.stubborn,
        floor=floors.nothing,
        variants=EVERY | {"torchrun": [TORCHRUN_OWN_STORE]},
    ),
    Scenario(
        keys=("P11",),
        title="simulated nodes form a cycle",
        marks="linear: a node's time within 2 x; 10 x faster than torch's at 256 nodes;"
        " idle: 1 operation a node and beat",
        sizes=(64, 256, 512, 1024),
        once=formation.cycles,
        floor=formation.connects,
        variants={"ours": [OURS], "torchrun": [TORCHRUN]},
    ),
    Scenario(
        keys=("P13",),
        title="straggler detection: an entry of a section, and a report with so many kinds of kernels",
        marks="entry that is not timed below 2 us; report at 8 ranks below 20 ms, linear in kinds, not in ranks",
        sizes=(1, 2, 8),
        once=training_cost.straggler,
        floor=floors.straggler,
        variants=ONLY_OURS,
    ),
    Scenario(
        keys=("P13",),
        title="rerun machine: a step with one check when nothing is wrong; the same with preemption",
        marks="both (step_and_stop) below 1 % of a 10 ms step: 100 us",
        sizes=(1, 2, 8),
        once=training_cost.rerun,
        floor=floors.rerun,
        variants=ONLY_OURS,
    ),
    Scenario(
        keys=("P14",),
        title="a launcher is asked, simulated ranks on one node, 20 faults: metrics, status, page in Chromium, memory",
        marks="at 1024 page_update below 50 ms, metrics below 20 ms, added memory below 8 MiB",
        sizes=(8, 1024),
        once=status_page.asked,
        floor=floors.nothing,
        variants=ONLY_OURS,
    ),
    Scenario(
        keys=("P14b",),
        title='ft_launcher report on generated journals of 30 days with 149 faults; "ranks" are nodes of 8 ranks',
        marks="at 256 below 10 s and 500 MiB",
        sizes=(16, 256),
        once=report_of_journals.taken,
        floor=floors.nothing,
        variants=ONLY_OURS,
    ),
    Scenario(
        keys=("P15",),
        title="a hang of simulated ranks: from what their nodes sent to the rank that holds up the others",
        marks="named below 2 s at 2048",
        sizes=(16, 256, 2048),
        once=guilty_rank.found,
        floor=floors.nothing,
        variants=ONLY_OURS,
        trials=guilty_rank.RUNS,
    ),
    Scenario(
        keys=("P3",),
        title=f"a rank's SIGKILL to all ranks' group ready, 2 and 4 agents of {several_nodes.RANKS} ranks",
        marks="below 0.5 s",
        sizes=(2, 4),
        once=several_nodes.crashes,
        floor=floors.nothing,
        variants=SEVERAL_NODES,
        trials=several_nodes.CRASHES,
    ),
    Scenario(
        keys=("P4",),
        title=LOSS.format("ranks' group ", "our", several_nodes.TIMEOUT_S),
        marks="below 1 s",
        sizes=(2, 3),
        once=several_nodes.loss,
        floor=floors.nothing,
        variants=SEVERAL_NODES,
    ),
    Scenario(
        keys=("P4",),
        title=LOSS.format("", "the default", DEFAULT.node_timeout),
        marks="below 1 s",
        sizes=(2, 3),
        once=partial(several_nodes.loss, timeout_s=DEFAULT.node_timeout, beat_s=DEFAULT.node_beat),
        floor=floors.nothing,
        variants=ONLY_OURS,
    ),
    Scenario(
        keys=("P17",),
        title="state in memory: what a save blocks and a load takes, in copies of the state (memcpy)",
        marks="first save at most 7, later ones 1.3 (0.1 where it overlaps with the training), load 3.5",
        sizes=(1, 2),
        once=state_in_memory.blocked,
        floor=floors.nothing,
        variants=WAYS,
    ),
    Scenario(
        keys=("P17b",),
        title="state of 1 GiB in memory: SIGKILL of one rank, all, the launcher with its ranks, to the first new step",
        marks="below 1.5 s",
        sizes=(2,),
        once=state_in_memory.killed,
        floor=floors.nothing,
        variants={"ours": [OURS_MEMORY]},
    ),
)
