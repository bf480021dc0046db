"""Decides which of the modules that a rank has imported the next zygote imports before it forks. Pure.

A module is chosen only if no script can notice that it was imported before the script began. A child of the next zygote
tries all modules first, under observation (`module_trial.py`). A module is left out
- if it is no file of an installed package: a user may edit it between two restarts,
- if its import does something to the process that cannot be hidden,
- if its import reads a variable in which ranks differ from the zygote,
- if its import exchanges a name that another import exchanges too,
- if its import loads a module that is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ft_launcher.node.zygote.hidden_parts import closure

MAX_REASONS = 40
"""Of modules that are left out for a reason of their own, for the journal."""
_LENGTH = 200
"""Characters of one reason: an exception's text may have any length."""


@dataclass(frozen=True)
class Tried:
    """What the import of one module did in the trial.

    Attributes:
        needs: the modules that it imported itself.
        reads: the variables of the environment that it read.
        effects: what it did to the process that cannot be hidden from forks, in words.
        sets: the variables that it changed -> their values afterwards (None: removed).
        exchanges: the names of other modules to which it gave other values. These are hidden with the module.
        installed: whether its code, if it has any, is a file of an installed package.
    """

    needs: Collection[str]
    reads: Collection[str]
    effects: Sequence[str] = ()
    sets: Mapping[str, str | None] = field(default_factory=dict)
    exchanges: Collection[str] = ()
    installed: bool = True


@dataclass(frozen=True)
class Surroundings:
    """The variables of the environment in which ranks differ from the zygote.

    Attributes:
        differing: those that the launcher has set differently for ranks.
        changed: those that were changed in a rank, by its script or by an import -> their values (None: removed).
    """

    differing: Collection[str] = ()
    changed: Mapping[str, str | None] = field(default_factory=dict)

    def differing_beside(self, sets: Mapping[str, str | None]) -> set[str]:
        """Returns the variables in which a script's imports differ; `sets`: what these imports change by themselves."""
        by_script = {name for name, value in self.changed.items() if name not in sets or sets[name] != value}
        return by_script.union(self.differing)


@dataclass(frozen=True)
class Choice:
    """The modules to import, in this order, and the reasons why others are left out.

    Modules that are left out only because they load another one have no entry.
    """

    names: Sequence[str]
    left_out: Mapping[str, str] = field(default_factory=dict)


def choose(
    names: Sequence[str], tried: Mapping[str, Tried], failed: Mapping[str, str], environ: Surroundings
) -> Choice:
    """Returns the modules of which no script can tell that they were imported before it.

    Args:
        names: of modules that a rank has imported.
        tried: all modules that their imports loaded in the trial.
        failed: name -> why its import failed, or what it did while no module's code ran.
        environ: the variables of ranks.
    """
    differing = environ.differing_beside(
        {name: value for module in tried.values() for name, value in module.sets.items()}
    )
    needs = {name: module.needs for name, module in tried.items()}
    loads = {name: closure([name], needs, tried) for name in tried}
    against = {name: _against(module, differing) for name, module in tried.items()}
    against |= _against_several(tried, loads) | dict(failed)
    reasons = {name: reason for name, reason in against.items() if reason}
    chosen = [name for name in names if name in tried and reasons.keys().isdisjoint(loads[name])]
    shown = list(reasons.items())[:MAX_REASONS]
    return Choice(chosen, {name: reason[:_LENGTH] for name, reason in shown})


def _against(module: Tried, differing: Collection[str]) -> str:
    """Returns why a module cannot be imported before the script; empty: it can, as far as its own code goes."""
    if not module.installed:
        return "it is no file of an installed package"
    if module.effects:
        return f"its import {module.effects[0]}"
    read = sorted(set(module.reads).intersection(differing))
    if read:
        return f"its import reads {read[0]}, which differs in ranks or is changed by the script"
    return ""


def _against_several(tried: Mapping[str, Tried], loads: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Returns why modules are left out that exchange the same name, by module.

    What a name is after the import of one of them alone is not known: in the trial it came after the others. Modules
    that load each other come together, in the order of the trial.

    Args:
        loads: all that the import of a module loads.
    """
    by_name: dict[str, list[str]] = {}
    for module, did in tried.items():
        for name in did.exchanges:
            by_name.setdefault(name, []).append(module)
    found = {}
    for name, modules in by_name.items():
        together = set.intersection(*(set(loads[module]) for module in modules))
        if not together.issuperset(modules):
            found.update(dict.fromkeys(modules, f"its import exchanges {name}, which another import exchanges too"))
    return found
