"""`python -m ft_launcher`."""

from __future__ import annotations

from ft_launcher.cli import main

if __name__ == "__main__":
    main()
