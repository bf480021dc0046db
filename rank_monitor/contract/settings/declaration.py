"""One setting as a field of a dataclass: its kind, its help text, and the conversion of a value from a source.

Which settings exist is declared in `config.py`. The launcher reads single values by `parse`, from the command line, the
environment and YAML. Monitors and template get whole groups of settings as JSON (`to_json`, `from_json`). The client's
alias does both.
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
    """The metadata of a field that is a setting.

    Attributes:
        kind: how a value is read.
        help: the help text.
        instead: of a setting that is accepted and does nothing: what is done instead. Empty: the setting has an effect.
    """

    kind: Kind
    help: str
    instead: str = ""


def setting(default: Any, kind: Kind, help: str, instead: str = "") -> Any:
    """Returns a dataclass field that is a setting.

    Args:
        default: the default, which is written nowhere else.
        kind: form and unit of the value.
        help: one line for `--help` and the reference.
        instead: of a setting that is accepted and does nothing: what is done instead. `--help` does not show it.
    """
    metadata = {"declaration": Declaration(kind, help, instead)}
    # A dataclass refuses a mutable default: instances would share it.
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declarations(group: type) -> dict[str, Declaration]:
    """Returns key -> declaration of every setting of `group`, a dataclass of settings."""
    return {field.name: field.metadata["declaration"] for field in dataclasses.fields(group)}


def default_of(group: type, key: str) -> Any:
    """Returns the default of one setting."""
    return getattr(group(), key)


def parse(group: type, key: str, raw: object, source: str) -> Any:
    """Reads one value. The text `default` gives the default; so does `none` where a setting must have a value.

    Args:
        group: the dataclass of the setting.
        key: the setting.
        raw: text from a command line or the environment, or a YAML value.
        source: where the value is from, for the error (`--ft-step-timeout`, `job.yaml`).

    Raises:
        ConfigError: the value does not fit the kind. The text names key, value and source.
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
    """Returns a dataclass of settings as plain JSON values: signals as numbers, tuples as lists."""
    values: dict[str, Any] = json.loads(json.dumps(vars(settings)))
    return values


def json_value(value: object) -> Any:
    """Returns one value as `to_json` has it."""
    return json.loads(json.dumps(value))


def from_json(group: type, values: Mapping[str, Any], source: str) -> Any:
    """Returns the settings of a group from JSON values. A key that is missing gets its default, an unknown one is
    ignored: another release may have more settings, or fewer.

    Raises:
        ConfigError: a value does not fit its kind.
    """
    known = declarations(group)
    return group(**{key: parse(group, key, value, source) for key, value in values.items() if key in known})
