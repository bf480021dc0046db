"""torch's `LaunchConfig` with every setting of ours as one more keyword.

The contract declares which settings exist; `settings/sources.py` merges keywords with YAML and environment in the same
way as options of a command line. Uses torch's underscored attributes of `DefaultLogsSpecs`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig as TorchLaunchConfig

from ft_launcher.settings import options, sources
from ft_launcher.settings.command_line import Parsed
from rank_monitor.contract.errors import nearest
from rank_monitor.contract.settings.config import GROUPS

_SOURCE = "LaunchConfig"
_FIELDS = tuple(field.name for field in fields(TorchLaunchConfig))


@dataclass(frozen=True)
class Keywords(Parsed):
    """Keywords of `LaunchConfig` in the form of a parsed command line."""

    def source_of(self, dest: str) -> str:
        """Returns the source of every value: `LaunchConfig`."""
        return _SOURCE


class LaunchConfig(TorchLaunchConfig):  # type: ignore[misc]
    """How a job is launched: the fields of torch's class, and every setting of ours by its key.

    As on the command line, a setting that is not given comes from the environment (`FT_<KEY>`), the YAML that
    `cfg_path` names, or its default; `none` or None means no limit. Of torch's fields all have defaults: one node with
    one rank, the rendezvous c10d, no log files. Settings can be read and set as attributes, too. Copy it by
    `copy.copy`: `dataclasses.replace` knows torch's fields only.

    Raises:
        TypeError: there is no such keyword.
        ConfigError: a value is wrong.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        keys = {name: _key(name) for name in keywords}
        ours = {key: keywords.pop(name) for name, key in keys.items() if key is not None}
        for name in keywords:
            if name not in _FIELDS:
                near = nearest(name, (*_FIELDS, *options.GROUP_OF, *options.ALIASES))
                raise TypeError(f"LaunchConfig has no option {name!r}{near}")
        values = {**dict(zip(_FIELDS, args, strict=False)), **keywords}
        least = {"min_nodes": 1, "max_nodes": values.get("min_nodes", 1), "nproc_per_node": 1, "rdzv_backend": "c10d"}
        if values.get("logs_specs") is None:
            keywords["logs_specs"] = DefaultLogsSpecs(log_dir=os.devnull)
        self.__dict__.update(_settings=ours, _stop_s=values.get("shutdown_timeout"))
        super().__init__(*args, **{name: value for name, value in least.items() if name not in values}, **keywords)
        self.resolved()

    def resolved(self) -> sources.Resolved:
        """Returns the merged settings, with the source of each.

        Raises:
            ConfigError: every wrong value of any source.
        """
        return sources.resolve(self.keywords(), os.environ)

    def keywords(self) -> Keywords:
        """Returns the values in the form of a parsed command line, torch's options by their names there."""
        ours: dict[str, Any] = {key: _plain(value) for key, value in vars(self)["_settings"].items()}
        theirs = {name: getattr(self, name) for name in _FIELDS}
        more = {
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "node_rank": int(self.rdzv_configs.get("rank", 0)),
            "rdzv_conf": self.rdzv_configs,
            "master_port": None,
            "standalone": False,
            "shutdown_timeout": vars(self)["_stop_s"],
        }
        return Keywords(Namespace(**theirs | more), ours, dict.fromkeys(ours, _SOURCE), frozenset(_FIELDS))

    def __getattr__(self, name: str) -> Any:
        key = _key(name)
        if key is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(getattr(self.resolved().settings, _ATTRIBUTE_OF[key]), key)

    def __setattr__(self, name: str, value: Any) -> None:
        key = _key(name)
        if key is None:
            super().__setattr__(name, value)
            return
        before = vars(self)["_settings"]
        self.__dict__["_settings"] = {**before, key: value}
        try:
            self.resolved()
        except Exception:
            self.__dict__["_settings"] = before
            raise


_ATTRIBUTE_OF = {
    key: attribute for key, group in options.GROUP_OF.items() for attribute, of in GROUPS.items() if of is group
}


def _key(name: str) -> str | None:
    key = options.ALIASES.get(name, name)
    if key in options.GROUP_OF:
        return key
    return None


def _plain(value: object) -> object:
    """Returns a value as YAML would have it: the value of an enum, text for a path."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def log_places(specs: DefaultLogsSpecs) -> tuple[str | None, Any, Any, set[int] | None]:
    """Returns log folder (None for no logs), redirects, tee and filter of torch's own log specifications."""
    if specs._root_log_dir in (None, os.devnull):
        folder = None
    else:
        folder = str(specs._root_log_dir)
    return folder, specs._redirects, specs._tee, specs._local_ranks_filter
