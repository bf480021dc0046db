"""Attribution: the evidence of a failed cycle in, a fault out, with class, likely cause and hint. Pure.

`agent/cycle/evidence.py` gathers the evidence; nothing here reads a file, a clock or a process. In the order of use:

- `triage.py`: before the ranks are stopped, whether stacks are needed.
- `cycle_evidence.py`: what is known of each rank; `scene.py` and `rank_view.py`: where a rank was at a hang.
- `first_failure.py`: finds the rank that failed first, and makes the `Fault` of `fault.py`.
- `collective.py` by `wait_graph.py`: for whom the ranks wait; `nccl_view.py` adds what NCCL knows, `own_lock.py` what
  the program's text shows, `all_nodes.py` puts the nodes together, `hang_clocks.py` decides while ranks still run.
- `known_errors.py`, `error_text.py`, `wrapped_errors.py`: what exceptions say; `hints.py`: signals and exit codes.
"""

from ft_launcher.decide.attribution.cycle_evidence import RankEvidence, iteration, signal_name, where
from ft_launcher.decide.attribution.fault import Fault, FaultClass, FaultKind
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.known_errors import BAD_LOSS

__all__ = [
    "BAD_LOSS",
    "Fault",
    "FaultClass",
    "FaultKind",
    "NodeEvidence",
    "RankEvidence",
    "iteration",
    "signal_name",
    "where",
]
