"""`FaultToleranceConfig`: our settings as one object that a script can fill, read from YAML and write.

Scripts find it as `nvidia_resiliency_ext.fault_tolerance.FaultToleranceConfig`, and give it to
`RankMonitorServer.run_in_subprocess`. The settings, their defaults and how values are read are those of
`rank_monitor.contract.settings.config`: the launcher reads its own files the same way.
"""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings import config
from rank_monitor.contract.settings.declaration import default_of, json_value, parse
from rank_monitor.contract.settings.kinds import means_none
from rank_monitor.contract.wire.foreign import MAX_USER_FILE_BYTES, read_file

logger = logging.getLogger("ft_client")

_GROUP_OF = {
    field.name: group
    for name, group in config.GROUPS.items()
    if name != "source"
    for field in dataclasses.fields(group)
}
_SECTION = "fault_tolerance"
_PREFIXES = ("ft_param_", "ft_")
_PATHS = ("fault_tol_cfg_path", "ft_cfg_path", "cfg_path")


class BadValue(ConfigError, ValueError):
    """A ConfigError that is a ValueError too, which scripts that were written for the peer catch."""


class _Readings:
    """Readers and the writer of a configuration: the base class of `FaultToleranceConfig`.

    `_is_set`: the keys that somebody has set, which `to_yaml_file` writes.
    """

    def __init__(self, **values: Any) -> None:
        """Reads each value as the launcher would. A key that is no setting of ours is ignored, with a warning.

        Raises:
            BadValue: naming key and value; also for None where a setting has no such value.
        """
        unknown = sorted(values.keys() - _GROUP_OF.keys())
        if unknown:
            logger.warning("not settings of ft_launcher, and ignored: %s", ", ".join(unknown))
        for key in _GROUP_OF:
            setattr(self, key, _read_value(key, values.get(key, _default(key))))
        self._is_set = values.keys() & _GROUP_OF.keys()

    def __setattr__(self, key: str, value: object) -> None:
        """Sets a value, and notes that it was set."""
        object.__setattr__(self, key, value)
        if "_is_set" in vars(self) and key in _GROUP_OF:
            self._is_set.add(key)

    @classmethod
    def from_kwargs(cls, ignore_not_recognized: bool = True, **kwargs: Any) -> Any:
        """Returns a configuration of these values.

        Args:
            ignore_not_recognized: whether a key that is no setting is a warning only; if not, it is an error.

        Raises:
            BadValue: a wrong value or key.
        """
        unknown = sorted(kwargs.keys() - _GROUP_OF.keys())
        if unknown and not ignore_not_recognized:
            raise BadValue(unknown[0], kwargs[unknown[0]], "FaultToleranceConfig", "is not a setting")
        return cls(**kwargs)

    @classmethod
    def from_yaml_file(cls, cfg_path: str, ignore_not_recognized: bool = True) -> Any:
        """Returns a configuration of the first mapping named `fault_tolerance` in a YAML file, at any depth.

        Raises:
            BadValue: the file cannot be read, or has no such mapping; a wrong value or key.
        """
        return cls.from_kwargs(ignore_not_recognized, **_read(cfg_path))

    @classmethod
    def from_args(cls, args: Namespace, cfg_file_arg: str | None = None, ft_args_prefix: str = "") -> Any:
        """Returns a configuration of what an argument parser found, and of the YAML file that an argument names.

        An argument `ft_KEY` or `ft_param_KEY` takes precedence over the file.

        Args:
            args: what the parser returned.
            cfg_file_arg: the argument that names the file; None: one of the launcher's own.
            ft_args_prefix: how the names of arguments begin that are settings; empty: as the launcher's own do.

        Raises:
            BadValue: as `from_yaml_file`.
        """
        parsed = {key: value for key, value in vars(args).items() if value is not None}
        path = next((parsed[key] for key in (cfg_file_arg, *_PATHS) if key in parsed), None)
        if path is None:
            found = {}
        else:
            found = dict(_read(path))
        prefixes: Sequence[str] = _PREFIXES
        if ft_args_prefix:
            prefixes = (ft_args_prefix,)
        for key, value in parsed.items():
            prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
            if prefix is not None:
                name = key.removeprefix(prefix)
                if name in _GROUP_OF:
                    found[name] = value
        return cls.from_kwargs(**found)

    def to_yaml_file(self, cfg_path: str) -> None:
        """Writes what was set as a YAML file that `from_yaml_file` and the launcher read.

        Defaults are not written. In a file they would count as values of the user, and take precedence over defaults
        that depend on other settings.
        """
        values = {key: getattr(self, key) for key in _GROUP_OF}
        given = {
            key: json_value(value) for key, value in values.items() if key in self._is_set or value != _default(key)
        }
        Path(cfg_path).write_text(yaml.safe_dump({_SECTION: given}, sort_keys=False))


def _read_value(key: str, raw: object) -> Any:
    """Reads one value. A log level becomes a number, since scripts compare it and pass it on.

    Raises:
        BadValue: naming key and value.
    """
    group = _GROUP_OF[key]
    try:
        value = parse(group, key, raw, "FaultToleranceConfig")
    except ConfigError as error:
        raise BadValue(error.key, error.value, error.source, error.problem, error.hint) from None
    # What the launcher reads as "the default holds", with a warning, is no value here.
    if means_none(raw) and value not in (None, (), {}):
        raise BadValue(key, raw, "FaultToleranceConfig", "cannot be none")
    if key == "log_level":
        return logging.getLevelName(value)
    return value


def _default(key: str) -> Any:
    """Returns the default of a setting; of the log level as a number."""
    value = default_of(_GROUP_OF[key], key)
    if key == "log_level":
        return logging.getLevelName(value)
    return value


def _read(cfg_path: str) -> Mapping[str, Any]:
    """Returns the first mapping named `fault_tolerance` in a YAML file.

    Raises:
        BadValue: the file cannot be read, or has no such mapping.
    """
    try:
        document = yaml.safe_load(read_file(cfg_path, MAX_USER_FILE_BYTES, follow_link=True).decode())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadValue("cfg_path", cfg_path, "FaultToleranceConfig", f"cannot be read: {error}") from None
    found = next(_sections(document), None)
    if not isinstance(found, Mapping):
        raise BadValue("cfg_path", cfg_path, "FaultToleranceConfig", f"has no mapping named `{_SECTION}`")
    return {str(key): value for key, value in found.items()}


def _sections(node: object) -> Iterator[object]:
    """Yields everything named `fault_tolerance` in a YAML document, the outer ones first."""
    if isinstance(node, Mapping):
        if _SECTION in node:
            yield node[_SECTION]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _sections(item)


FaultToleranceConfig: Any = dataclasses.make_dataclass(
    "FaultToleranceConfig",
    [(key, Any) for key in _GROUP_OF],
    bases=(_Readings,),
    init=False,
)
"""All settings, each under its key, with our defaults."""
FaultToleranceConfig.__module__ = __name__
