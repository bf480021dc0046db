"""The monitor of one rank: a small process beside it that detects a hang and reports where it is.

Standard library only; nothing here may import torch. What other packages may import is `rank_monitor.contract`.
"""

__version__ = "0.1.0"
