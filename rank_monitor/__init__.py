"""The monitor of one rank: a small process beside it that tells a hang, and says where.

Standard library only; nothing here may import torch. What other packages may import is `rank_monitor.contract`.
"""

__version__ = "0.1.0"
