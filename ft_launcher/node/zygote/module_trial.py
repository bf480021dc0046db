"""Tries the imports that a rank has reported, in a child process at low priority; then makes the chosen ones here.

Called by `fork_server.py` in the fork of the zygote that is to become the next zygote. Ranks train meanwhile, and the
present zygote serves the agent: nobody waits for the trial, nor for the pauses between the imports.

Why a trial: an import may do things that a script would notice, such as setting a variable or starting a thread. They
must not happen in the zygote. So a child imports all modules while everything is observed (`import_effects.py`,
`import_recorder.py`), and `learned_modules.py` chooses the modules that no script can notice.

The order of one `learn`:

    the next zygote   `_try` forks a child, and waits for its report in a file in memory (memfd)
      the child       imports every module at nice 19, observes, chooses, writes the report as JSON, ends
    the next zygote   tries again where names were exchanged that nobody was looking at
    the next zygote   imports the chosen modules, under the same recording, and rests after each

Why up to three trials: names that imports exchange in other modules are found in the first child, by one comparison at
its end (0.1 s); a comparison after each of 800 modules would cost more than the imports. The second child looks at
these names alone after each module's code, and so finds which module exchanged which. A third one is for imports that
do not do the same twice.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from typing import Any

from ft_launcher.node.zygote import learned_modules
from ft_launcher.node.zygote.exchanged_names import Holdings, Place
from ft_launcher.node.zygote.first_import import imports
from ft_launcher.node.zygote.import_effects import ImportEffects
from ft_launcher.node.zygote.import_recorder import Part, root
from ft_launcher.node.zygote.learned_modules import Choice, Surroundings, Tried
from rank_monitor.contract.installed import is_installed
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.processes.wait import readable

_TRIAL_S = 600.0
"""Seconds for the child. Its imports take 2 to 3 s of CPU time, and the ranks may leave it little of the CPU."""
_LOWEST = 19
"""The lowest priority of nice(2). The child runs at it, so that ranks which train do not wait for the child."""
_TRIALS = 3
"""Trials at most. The first paragraphs of this file say what each is for."""
_REST = 3.0
"""How many times longer this process rests than it works: the training has the rest of the core."""


@dataclass(frozen=True)
class _Found:
    """What a child has found.

    Attributes:
        choice: the modules to import, and why others are left out.
        exchanged: names in other modules that have other values after the imports.
    """

    choice: Choice
    exchanged: Sequence[Place] = ()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> _Found:
        """Returns what a child of this process has written. No validation: the child runs this very file."""
        return cls(Choice(**found["choice"]), [Place(*words) for words in found["exchanged"]])


def learn(names: Sequence[str], environ: Surroundings, settle: Callable[[], None]) -> dict[str, Any]:
    """Tries these modules, and imports the ones that no script can notice. Takes seconds to minutes, mostly resting.

    Args:
        names: modules that a rank has imported.
        environ: the variables of ranks, as for `learned_modules.choose`.
        settle: called first in each child: has it end with this process.

    Returns:
        The fields of `next_zygote.Learned`, for the journal.
    """
    found = _try_until_known(names, environ, settle)
    choice = found.choice
    before_kib, pause = _anonymous_kib(), _Pause()
    with imports.recording(pause, found.exchanged):
        for name in choice.names:
            importlib.import_module(name)
            pause()
    mib = (_anonymous_kib() - before_kib) / 1024
    return {"names": list(choice.names), "left_out": dict(choice.left_out), "mib": round(mib, 1)}


def _try_until_known(names: Sequence[str], environ: Surroundings, settle: Callable[[], None]) -> _Found:
    """Tries the imports until it is known which module exchanges which name; returns what was found last."""
    before = _Found(Choice([]))
    for _ in range(_TRIALS):
        found = _try(names, environ, settle, before)
        if {*found.exchanged} <= {*before.exchanged}:
            return replace(found, exchanged=before.exchanged)
        before = replace(found, exchanged=sorted({*before.exchanged, *found.exchanged}))
    return _Found(Choice([], {"": f"each of {_TRIALS} trials exchanged other names"}))


def _try(names: Sequence[str], environ: Surroundings, settle: Callable[[], None], before: _Found) -> _Found:
    """Makes one trial in a child, and waits for its end. A trial that fails chooses no module, and says why.

    Args:
        names, environ, settle: as of `learn`.
        before: what the trial before this one has found.
    """
    report = os.memfd_create("ft_trial")
    try:
        child = fork()
        if child == 0:
            _run_child(report, names, environ, settle, before)
        pidfd = os.pidfd_open(child)
        try:
            if not readable([pidfd], _TRIAL_S):
                os.kill(child, 9)  # The exit code was not taken yet, so the pid is still the child's.
            _, status = os.waitpid(child, 0)
        finally:
            os.close(pidfd)
        if status != 0:
            return _Found(Choice([], {"": f"the trial ended with {os.waitstatus_to_exitcode(status)}"}))
        with os.fdopen(os.dup(report), "rb") as file:
            file.seek(0)
            return _Found.from_json(json.load(file))
    finally:
        os.close(report)


def _run_child(
    report: int, names: Sequence[str], environ: Surroundings, settle: Callable[[], None], before: _Found
) -> None:
    """The child: imports all modules, writes what was found to `report`, and ends. Never returns.

    The modules' code runs here for the first time, and may do anything: print, start threads, end the process. So the
    streams go to a file, the process ends by `os._exit`, and the parent expects every way to end.

    Args:
        report: descriptor of the file in memory that the parent reads.
        names, environ, settle, before: as of `_try`.
    """
    try:
        settle()
        os.nice(_LOWEST)
        printed = os.memfd_create("ft_printed")
        # The console is not for a trial. A module that prints at its import is left out.
        for number in range(3):
            os.dup2(printed, number)
        sys.dont_write_bytecode = True  # Python would write files, and written files count as an effect of the module.
        found = _import_all(names, environ, before)
    except BaseException as error:  # the edge of a process
        found = _Found(Choice([], {"": f"the trial failed ({type(error).__name__}: {error})"}))
    try:
        with os.fdopen(report, "w") as file:
            json.dump(asdict(found), file)
    finally:
        os._exit(0)


def _import_all(names: Sequence[str], environ: Surroundings, before: _Found) -> _Found:
    """Imports all modules one by one, under observation; returns which may be imported in the zygote. Runs in the
    child.

    A module whose import fails is left out, and so is one that `sys.path` finds in a file of the user's, and not in an
    installed package.
    """
    # What was left out stays left out: an import may do something only the first time, such as making a folder.
    failed = dict(before.choice.left_out)
    led: dict[str, bool] = {}
    imports.give_back()  # The state of torch is observed too, so torch must be visible.
    holdings = Holdings(sys.modules)
    with ImportEffects() as effects, imports.recording(effects, before.exchanged) as recorder:
        for name in names:
            package = root(name)
            if name in sys.modules:
                continue
            if package not in led:
                led[package] = package in sys.modules or _leads_to_installed(package)
            if not led[package]:
                failed[name] = "sys.path leads elsewhere for it"
                continue
            try:
                importlib.import_module(name)
            except BaseException as error:
                failed[name] = f"its import failed ({type(error).__name__})"
            strays = recorder.drain_outside()
            if strays:
                failed.setdefault(name, f"its import {strays[0]}")
    exchanged = [exchange.place for exchange in holdings.exchanges()]
    _put_back(recorder.parts)
    tried = {
        name: Tried(
            needs=part.needs,
            reads=part.reads,
            effects=part.effects,
            sets={variable.name: variable.after for variable in part.environ},
            exchanges={str(exchange.place) for exchange in part.exchanges},
            installed=_is_installed(part),
        )
        for name, part in recorder.parts.items()
    }
    return _Found(learned_modules.choose(names, tried, failed, environ), exchanged)


def _put_back(parts: Mapping[str, Part]) -> None:
    """Puts exchanged names back, as the zygote will. A name for which that fails is an effect of the module.

    The last exchange is undone first, since two modules may have exchanged one name after the other.
    """
    made = [(exchange, part) for part in parts.values() for exchange in part.exchanges]
    for exchange, part in sorted(made, key=lambda pair: pair[0].order, reverse=True):
        if exchange.place.module == "__main__":  # Each rank has a `__main__` of its own.
            part.effects.append(f"exchanges {exchange.place}")
            continue
        try:
            exchange.undo()
        except Exception as error:
            part.effects.append(f"exchanges {exchange.place}, which cannot be put back ({type(error).__name__})")


def _leads_to_installed(package: str) -> bool:
    """Returns whether `sys.path` leads to an installed package for this name, and not to a file of the user's."""
    spec = PathFinder.find_spec(package)
    if spec is None:
        return False
    if spec.origin:
        return is_installed(spec.origin)
    return all(is_installed(folder) for folder in spec.submodule_search_locations or ())


def _is_installed(part: Part) -> bool:
    """Returns whether a module is of an installed package. True for a module that another one has made, and for a
    folder without code."""
    spec = getattr(part.module, "__spec__", None)
    if spec is None or not spec.has_location:
        return True
    of_python = os.path.dirname(os.__file__)  # noqa: PTH120 (compared as text)
    return is_installed(spec.origin) or spec.origin.startswith(of_python)


class _Pause:
    """A function to call between modules: sleeps in proportion to the CPU time since the last call."""

    def __init__(self) -> None:
        self._worked_s = time.process_time()

    def __call__(self) -> Sequence[str]:
        time.sleep(_REST * (time.process_time() - self._worked_s))
        self._worked_s = time.process_time()
        return ()


def _anonymous_kib() -> int:
    """Returns the memory of this process that does not mirror a file (KiB): what the imports have added costs this much
    once per node, and not in each rank."""
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123 (a Path of this process would be one more import)
        for line in file:
            if line.startswith(b"RssAnon"):
                return int(line.split()[1])
    return 0
