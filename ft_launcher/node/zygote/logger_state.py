"""Takes loggers that an import made out of `logging`'s table of all loggers, and puts them back.

A script that looks at this table, or configures all loggers in it (`logging.config`), must not find loggers of modules
that it has not imported. Called by `first_import.py`, in the zygote and in its ranks, which knows which import made a
logger.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LoggerState:
    """A logger, and the settings that an import gave it. The logger itself is the same object before and after it was
    hidden: modules keep references to their loggers.

    Attributes:
        logger: the logger.
        level, propagate, disabled, handlers, filters: its attributes of these names, when the import had ended.
    """

    logger: logging.Logger
    level: int
    propagate: bool
    disabled: bool
    handlers: list[logging.Handler]
    filters: list[Any]

    @classmethod
    def of(cls, logger: logging.Logger) -> LoggerState:
        """Returns the state of a logger now."""
        has = logger
        return cls(has, has.level, has.propagate, has.disabled, list(has.handlers), list(has.filters))

    def make_new(self) -> logging.Logger:
        """Resets the logger to the state of a new one; returns it.

        For a script that asks for a logger of this name before it imports the module: in a fresh interpreter it would
        get a new one.
        """
        self.logger.level, self.logger.propagate, self.logger.disabled = logging.NOTSET, True, False
        self.logger.handlers, self.logger.filters = [], []
        return self.logger

    def apply(self) -> None:
        """Applies what the import did to the logger, on top of what the script may have done to it meanwhile."""
        self.logger.level = self.level or self.logger.level
        self.logger.propagate = self.propagate and self.logger.propagate
        self.logger.disabled = self.disabled or self.logger.disabled
        self.logger.handlers += [handler for handler in self.handlers if handler not in self.logger.handlers]
        self.logger.filters += [rule for rule in self.filters if rule not in self.logger.filters]


def forget(states: Mapping[str, LoggerState]) -> dict[str, logging.PlaceHolder]:
    """Removes loggers, and the placeholders of their parents, from the table of all loggers.

    Returns:
        The placeholders that were removed, by name: those below which no other logger is.
    """
    known = logging.root.manager.loggerDict
    for name, state in states.items():
        if known.get(name) is state.logger:
            del known[name]
        state.logger._cache.clear()  # type: ignore[attr-defined]  # which levels it found to be enabled
    held = {name: entry for name, entry in known.items() if isinstance(entry, logging.PlaceHolder)}
    others = known.keys() - held.keys()
    free = {name: entry for name, entry in held.items() if not any(other.startswith(f"{name}.") for other in others)}
    for name in free:
        del known[name]
    return free


def renew(states: Mapping[str, LoggerState]) -> None:
    """Puts loggers back into the table, each linked with the parents and children that are there now.

    `logging.getLogger` does both: `Imports` has it make the hidden logger in the place of a new one.
    """
    for name, state in states.items():
        if logging.getLogger(name) is state.logger:
            state.apply()
    # Has each logger drop its cache of the levels that are enabled.
    logging.root.setLevel(logging.root.level)
