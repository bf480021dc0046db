"""Decides which of the modules that a rank has imported the next zygote imports before it forks. Pure.

A child of the zygote tries them first (`module_trial.py`). A module is left out with all modules whose import loads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ft_launcher.zygote.hidden_parts import closure

MAX_REASONS = 40
"""Of modules that are left out for a reason of their own, for the journal."""
_LENGTH = 200
"""Characters of one reason: an exception's text may have any length."""


@dataclass(frozen=True)
class Tried:
    """What the import of one module did.

    `effects`: to the process, which forks would show. `sets`: variables, with their values afterwards (None: removed).
    `installed`: whether its code, if it has any, is a file of an installed package.
    """

    needs: Collection[str]
    reads: Collection[str]
    effects: Sequence[str] = ()
    sets: Mapping[str, str | None] = field(default_factory=dict)
    installed: bool = True


@dataclass(frozen=True)
class Surroundings:
    """In which variables ranks differ from the zygote.

    `differing`: those that the launcher has set. `changed`: those that were changed in a rank, by its script or by an
    import, with their values (None: removed).
    """

    differing: Collection[str] = ()
    changed: Mapping[str, str | None] = field(default_factory=dict)

    def differing_beside(self, sets: Mapping[str, str | None]) -> set[str]:
        """Returns the variables in which a script's imports differ; `sets`: what these imports change by themselves."""
        by_script = {name for name, value in self.changed.items() if name not in sets or sets[name] != value}
        return by_script.union(self.differing)


@dataclass(frozen=True)
class Choice:
    """The names to import, in this order, and why others are left out, of those with a reason of their own."""

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
    against = {name: _against(module, differing) for name, module in tried.items()} | dict(failed)
    reasons = {name: why for name, why in against.items() if why}
    needs = {name: module.needs for name, module in tried.items()}
    chosen = [name for name in names if name in tried and reasons.keys().isdisjoint(closure([name], needs, tried))]
    told = list(reasons.items())[:MAX_REASONS]
    return Choice(chosen, {name: why[:_LENGTH] for name, why in told})


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
