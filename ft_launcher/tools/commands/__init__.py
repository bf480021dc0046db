"""Has the subcommands of `ft_launcher` that start no training: one module each, with a command of click in it.

`cli.py` imports a module only when its command is called, since each needs packages that a training does not. What a
command finds goes to stdout, warnings and errors go to stderr.
"""
