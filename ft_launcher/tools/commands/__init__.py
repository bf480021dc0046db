"""Subcommands of `ft_launcher` that start no training."""
