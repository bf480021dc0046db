"""Evidence of a failed cycle in, a fault out: who failed first, what, where, why, its class, and a hint. Pure.

`cycle_evidence` holds what is known, `first_failure` finds the cause among the ranks, `known_errors` and
`error_text` read what exceptions say, `fault` is the result. Knows no process and no file; `agent/cycle/evidence.py`
gathers.
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
