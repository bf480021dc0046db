"""Reads the YAML file with settings, and finds the one mapping in it that is ours.

Called by `sources.py`, which reads its keys. Knows the mapping's name, and no setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rank_monitor.contract.errors import ConfigError, one_line

SECTION = "fault_tolerance"


class NoSuchFile(ConfigError):
    """The file does not exist."""


def section(path: str, named_by: str, ignore_missing: bool) -> Mapping[Any, Any]:
    """Returns the first mapping named `fault_tolerance`, at any depth, in the order of the file.

    Args:
        path: the file.
        named_by: the option or variable that names it.
        ignore_missing: a file or mapping that is not there counts as empty.

    Raises:
        NoSuchFile: the file does not exist.
        ConfigError: the file cannot be read, is not YAML, is not a mapping, or has no such mapping.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if ignore_missing:
            return {}
        hint = "Check the path, or add --ft-ignore-missing-cfg"
        raise NoSuchFile("cfg_path", path, named_by, "there is no such file", hint) from None
    except OSError as error:
        hint = "Name a file that this user can read"
        raise ConfigError("cfg_path", path, named_by, f"cannot be read: {error.strerror}", hint) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        hint = "Correct the file"
        raise ConfigError("cfg_path", path, named_by, f"is not YAML: {_problem(error)}", hint) from None
    return _find(document, path, named_by, ignore_missing)


def _find(document: Any, path: str, named_by: str, ignore_missing: bool) -> Mapping[Any, Any]:
    hint = f"Put the settings under `{SECTION}:`"
    if document is not None and not isinstance(document, Mapping):
        if isinstance(document, list):
            kind = "list"
        else:
            kind = "single value"
        raise ConfigError("cfg_path", path, named_by, f"is a {kind}, not a mapping", hint)
    others = []
    # `seen`, since an anchor in YAML can make a mapping contain itself.
    waiting: list[Any] = [document]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (Mapping, list)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping) and SECTION in node:
            ours = node[SECTION]
            if isinstance(ours, Mapping):
                return ours
            others.append(ours)
        if isinstance(node, Mapping):
            waiting += reversed(list(node.values()))
        else:
            waiting += reversed(node)
    if others and others[0] is not None:
        raise ConfigError("cfg_path", path, named_by, f"`{SECTION}` in it is not a mapping of keys to values", hint)
    if others or ignore_missing:
        return {}
    raise ConfigError("cfg_path", path, named_by, f"has no mapping named `{SECTION}`", hint)


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return one_line(error)
