"""What programs get that call torch's launcher, where FT_AS_TORCHRUN is set.

`torchrun`, `python -m torch.distributed.run`, `accelerate launch`, notebooks and others call a few functions of torch.
With the variable `torchrun_hook.py` has `change` put ours in their place:

- `torch.distributed.run.main` without arguments, as `torchrun` calls it, and `python -m torch.distributed.run` and
  `.launch`: the command `ft_launcher` with the same arguments, in this process, which it ends (`program`).
- `torch.distributed.run.main(args)` and `run(args)`: `python_api.job_of_namespace`, within the program.
- `torch.distributed.launcher.api.launch_agent`, and so `elastic_launch`: as `ft_launcher.launch`, within the program.

**Never a failure that torch would not have.** What this launcher cannot take, such as a start method that it does not
know, goes to torch, with a line that says why. So does a launch in a rank of a job.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from ft_launcher.torchrun_hook import API, RUN, remove, say
from rank_monitor.contract import env
from rank_monitor.contract.errors import FtError, one_line

_OF_A_RANK = "TORCHELASTIC_RUN_ID"
"""Set by every launcher for its ranks, torch's too."""
_NESTED = "this is a rank of a job"


class _NotOurs(Exception):
    """This launcher cannot do it; the text says why."""


def change(module: ModuleType) -> None:
    """Puts our functions in a module of torch that has just been loaded."""
    if module.__name__ == RUN:
        ours: dict[str, Callable[..., Any]] = {"main": _main, "run": _run}
    elif module.__name__ == API:
        ours = {"launch_agent": _launch_agent}
    else:
        ours = {}
    for name, function in ours.items():
        setattr(module, name, _in_place_of(getattr(module, name), function))


def program() -> NoReturn:
    """Is the command `ft_launcher` with the arguments of this program, in its process. In a rank it is torch's own."""
    remove()
    if _OF_A_RANK in os.environ:
        say(f"{env.AS_TORCHRUN}: torch's own launcher is used: {_NESTED}")
        from torch.distributed.run import main

        main()
        sys.exit(0)
    from ft_launcher import cli

    say(f"{env.AS_TORCHRUN}: ft_launcher runs in the place of torchrun")
    sys.argv[0] = "ft_launcher"
    cli.program()


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ours, or torch's where ours refuses, or this process is a rank."""

    def call(*args: Any, **more: Any) -> Any:
        reason = ""
        if _OF_A_RANK in os.environ:
            reason = _NESTED
        else:
            try:
                return ours(*args, **more)
            except _NotOurs as refused:
                reason = str(refused)
        say(f"{env.AS_TORCHRUN}: torch's own launcher is used: {reason}")
        return theirs(*args, **more)

    call.__name__, call.__doc__, call.__wrapped__ = theirs.__name__, theirs.__doc__, theirs  # type: ignore[attr-defined]
    return call


def _main(args: Sequence[str] | None = None) -> None:
    """In the place of `torch.distributed.run.main`."""
    if args is None:
        program()
    from torch.distributed.run import parse_args

    _run(parse_args(list(args)))


def _run(args: Namespace) -> None:
    """In the place of `torch.distributed.run.run`, whose argument is what torch's parser returned."""
    from ft_launcher import python_api

    python_api.run_job(partial(_made, python_api.job_of_namespace, args))


def _launch_agent(config: Any, entrypoint: Any, args: Sequence[Any], health_check_server: Any = None) -> dict[int, Any]:
    """In the place of `torch.distributed.launcher.api.launch_agent`, which `elastic_launch` calls."""
    from ft_launcher import python_api

    if health_check_server is not None:
        raise _NotOurs("the program has a health check server of its own for torch's agent")

    def job() -> Any:
        return python_api.job_of(entrypoint, args, python_api.LaunchConfig.of(config))

    return python_api.run_job(partial(_made, job))


def _made(make_job: Callable[..., Any], *args: Any) -> Any:
    """Returns what `make_job` makes. Raises _NotOurs: it cannot be made by this launcher."""
    try:
        return make_job(*args)
    except (FtError, TypeError, ValueError) as problem:
        raise _NotOurs(one_line(problem)) from None
