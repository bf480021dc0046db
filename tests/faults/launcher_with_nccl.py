"""The launcher as `python -m ft_launcher` runs it, where torch says that it has NCCL: of a CPU build it is not true.

A restart waits longer for NCCL's answer, which may come late from a machine that runs four tests at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from ft_launcher import cli

own_main = cli.main


def main(*arguments: Any) -> NoReturn:
    """Runs after the fork of the zygote, before which no torch may be imported."""
    from ft_launcher.agent import ranks
    from ft_launcher.agent.cycle import nccl_ras

    vars(nccl_ras)["is_nccl_available"] = lambda: True
    patient = nccl_ras.RasWaits(first_bytes_s=60.0, answer_s=60.0, restart_s=60.0)
    vars(ranks)["NcclRas"] = partial(nccl_ras.NcclRas, waits=patient)
    own_main(*arguments)


if __name__ == "__main__":
    cli.main = main
    rank = cli.launch()
    with rank:
        rank.prepare_program()()
    rank.end()
