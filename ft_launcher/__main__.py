"""`python -m ft_launcher`."""

from __future__ import annotations

from ft_launcher.cli import program

if __name__ == "__main__":
    program()
