"""One setting as a field of a dataclass: its kind, its help text, and the conversion of a value from a source.

Which settings exist is declared in `config.py`. The launcher calls `parse`, monitors and template call `from_json`, and
the client's alias both.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.kinds import Kind, means_none


@dataclass(frozen=True)
class Declaration:
    """The metadata of a field that is a setting: how its value is read, its help text, and why it does nothing."""

    kind: Kind
    help: str
    instead: str = ""


def setting(default: Any, kind: Kind, help: str, instead: str = "") -> Any:
    """A dataclass field that is a setting.

    Args:
        default: its default; it is written nowhere else.
        kind: form and unit of its value.
        help: one line for `--help` and the reference.
        instead: of a setting that is accepted and does nothing: what is done instead. `--help` does not show it.
    """
    metadata = {"declaration": Declaration(kind, help, instead)}
    # A dataclass refuses a mutable default: instances would share it.
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declarations(group: type) -> dict[str, Declaration]:
    """Key -> declaration of every setting of a dataclass of settings."""
    return {field.name: field.metadata["declaration"] for field in dataclasses.fields(group)}


def default_of(group: type, key: str) -> Any:
    """The default of one setting."""
    return getattr(group(), key)


def parse(group: type, key: str, raw: object, source: str) -> Any:
    """Reads one value.

    Args:
        raw: text from a command line or the environment, or a YAML value.
        source: where it is from, for the error (`--ft-step-timeout`, `job.yaml`).

    Raises:
        ConfigError: naming key, value and source.
    """
    declaration = declarations(group)[key]
    default = default_of(group, key)
    if default is not None and isinstance(raw, str) and raw.strip().lower() == "default":
        return default
    try:
        return declaration.kind.read(raw)
    except ValueError as problem:
        if default is not None and means_none(raw):
            return default
        raise ConfigError(key, raw, source, str(problem), f"Expected: {declaration.kind.form}") from None


def to_json(settings: Any) -> dict[str, Any]:
    """A dataclass of settings as plain JSON values (signals as numbers, tuples as lists)."""
    values: dict[str, Any] = json.loads(json.dumps(vars(settings)))
    return values


def json_value(value: object) -> Any:
    """One value as `to_json` has it."""
    return json.loads(json.dumps(value))


def from_json(group: type, values: Mapping[str, Any], source: str) -> Any:
    """The settings of a group from JSON values; a key that is missing takes its default, an unknown one is ignored.

    Raises:
        ConfigError: a value that does not fit its kind.
    """
    known = declarations(group)
    return group(**{key: parse(group, key, value, source) for key, value in values.items() if key in known})
