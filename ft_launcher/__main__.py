"""Runs `cli.launch` for `python -m ft_launcher`."""

from __future__ import annotations

from ft_launcher.cli import launch

if __name__ == "__main__":
    rank = launch()  # as `program` does, which would be one frame more below every rank's script
    with rank:
        rank.prepare_program()()
    rank.end()
