"""The finder of Python's import that maps names of `nvidia_resiliency_ext` to our modules.

`__init__.py` puts the finder in place when a script asks for the alias. Then Python asks it first for each module:

1. A name that does not begin with `nvidia_resiliency_ext` is left to the other finders.
2. The longest entry of `_TARGETS` with which the name begins counts. The rest of the name is appended to its target.
3. A module of ours that exists under its own name is shared, not loaded a second time: a class is the same under both
   names, so that `except` and `isinstance` work whichever name a script uses.
4. A name without an entry is looked for in `peer/`, whose modules are loaded under the peer's names only.
5. Where there is nothing, the error of the import says why: `_MISSING` has the reasons.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from rank_monitor.contract.installed import file_of

logger = logging.getLogger("ft_client")

_PEER = "nvidia_resiliency_ext"
_ALIAS = "ft_client.integrations.nvrx_alias"
_OWN_ROOMS = f"{_ALIAS}.peer"
"""The package that is loaded under the peer's own name."""

_LOCAL = "ft_client.integrations.local_checkpoints"
_STRAGGLER = "ft_client.straggler"
_TARGETS = {
    "checkpointing.utils": f"{_LOCAL}.debug",
    "checkpointing.local.base_state_dict": f"{_LOCAL}.state_dicts",
    "checkpointing.local.basic_state_dict": f"{_LOCAL}.state_dicts",
    "checkpointing.local.ckpt_managers.base_manager": f"{_LOCAL}.base_manager",
    "checkpointing.local.ckpt_managers.local_manager": f"{_LOCAL}.local_manager",
    "checkpointing.local.replication.group_utils": f"{_LOCAL}.group_utils",
    "checkpointing.local.replication.strategies": f"{_LOCAL}.strategies",
    "inprocess": "ft_client.inprocess",
    "inprocess.tools": f"{_OWN_ROOMS}.inprocess_tools",
    "inprocess.tools.inject_fault": f"{_ALIAS}.inject_fault",
    "inprocess.wrap": "ft_client.inprocess.wrapper",
    "straggler": _STRAGGLER,
    "straggler.statistics": f"{_STRAGGLER}.samples",
    "straggler.straggler": _STRAGGLER,
    "attribution.straggler": _STRAGGLER,
    "attribution.straggler.statistics": f"{_STRAGGLER}.samples",
    "attribution.straggler.straggler": _STRAGGLER,
    "ptl_resiliency": "ft_client.integrations.lightning",
    "shared_utils.inject_fault": f"{_ALIAS}.inject_fault",
    "shared_utils.wait_daemon": "ft_client.inprocess.wait_daemon",
    "fault_tolerance.config": f"{_ALIAS}.config",
    "fault_tolerance.rank_monitor_client": "ft_client.rank_monitor_client",
    "fault_tolerance.rank_monitor_server": f"{_ALIAS}.rank_monitor_server",
}
_PTL_CALLBACKS = ("fault_tolerance_callback", "fault_tolerance_sections_callback", "straggler_det_callback")
_TARGETS |= {f"ptl_resiliency.{name}": "ft_client.integrations.lightning" for name in _PTL_CALLBACKS}
_BARE = {
    "attribution",
    "checkpointing",
    "checkpointing.local",
    "checkpointing.local.ckpt_managers",
    "checkpointing.local.replication",
    "shared_utils",
}
"""Packages of the peer of which we have only what stands below them."""
_MISSING = {
    "checkpointing": "of the peer's checkpointing there are local checkpoints only",
    "ptl_resiliency.local_checkpoint_callback": "checkpoint formats are not part of ft_launcher",
    "attribution": "of the peer's attribution there is straggler detection only; ft_launcher explains faults itself",
}


class Shared(Loader):
    """The loader that gives a module of ours a second name.

    Args:
        target: the module's spec under its own name.
    """

    def __init__(self, target: ModuleSpec) -> None:
        self._target = target
        self._own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module that is loaded under its own name, or loads it.

        Raises:
            ImportError: the module cannot be loaded, as under its own name.
        """
        module = import_module(self._target.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing, since the module has run. Gives the module its own spec back, which Python has replaced."""
        module.__spec__ = self._own

    def get_code(self, name: str) -> CodeType | None:
        """Returns the module's code, for `python -m` with the peer's name."""
        code: CodeType | None = self._target.loader.get_code(self._target.name)  # type: ignore[union-attr]
        return code


class Finder(MetaPathFinder):
    """Finds modules by the peer's names, before all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of ours. None for a name that is not the peer's, or when the peer is installed.

        Raises:
            ModuleNotFoundError: we have no such module; the text says why.
        """
        if fullname == _PEER:
            real = _real_package()
            if real is not None:
                _leave_alone(real)
                return None
            return _own_room(fullname, _OWN_ROOMS)
        if not fullname.startswith(f"{_PEER}."):
            return None
        name = fullname.removeprefix(f"{_PEER}.")
        if name in _BARE:
            return ModuleSpec(fullname, None, is_package=True)
        ours = _target_of(name)
        spec = _spec_of(ours)
        if spec is None:
            # The error names the package to install and not the module: for `from package import name` Python would
            # replace an error with the module's own name by one without the reason.
            raise ModuleNotFoundError(_reason_missing(name), name="nvidia-resiliency-ext")
        if ours.startswith(_OWN_ROOMS):
            return _own_room(fullname, ours)
        return ModuleSpec(
            fullname, Shared(spec), origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )


_finder = Finder()


def put_in_place(check: bool = True) -> bool:
    """Puts the finder before all other finders, once.

    Args:
        check: whether to look for the real package now; if not, it is looked for at the first import of its name.

    Returns:
        Whether the peer's names are ours, as far as is known.
    """
    loaded = sys.modules.get(_PEER)
    if loaded is not None and not getattr(loaded, "__ft_alias__", False):
        return _leave_alone(getattr(loaded, "__file__", None) or _PEER)
    if check and loaded is None:
        real = _real_package()
        if real is not None:
            return _leave_alone(real)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return True


def _leave_alone(real: str) -> bool:
    """Removes this finder because the real package is installed, and logs that."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    logger.warning("%s is installed (%s): it is used as it is, and ft_launcher's alias is not", _PEER, real)
    return False


def _real_package() -> str | None:
    """Returns a file of the real package, as the other finders see it; None: it is not installed."""
    for other in sys.meta_path:
        find = getattr(other, "find_spec", None)
        if find is None or other is _finder:
            continue
        file = file_of(find(_PEER, None))
        if file is not None:
            return file
    return None


def _own_room(fullname: str, ours: str) -> ModuleSpec | None:
    """Returns a spec that runs the file of our module `ours` as the module `fullname`."""
    spec = _spec_of(ours)
    assert spec is not None and spec.origin is not None
    return importlib.util.spec_from_file_location(
        fullname, spec.origin, submodule_search_locations=spec.submodule_search_locations and []
    )


def _spec_of(name: str) -> ModuleSpec | None:
    """Returns the spec of a module of ours; None: there is no such module.

    Raises:
        ModuleNotFoundError: a package above the module needs something that is not installed.
    """
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _target_of(name: str) -> str:
    """Returns the name of our module for a module of the peer: by the table, else below `peer/`.

    Args:
        name: the module without the name of the peer's package, such as `inprocess.abort`.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        target = _TARGETS.get(".".join(parts[:length]))
        if target is not None:
            return ".".join([target, *parts[length:]])
    return f"{_OWN_ROOMS}.{name}"


def _reason_missing(name: str) -> str:
    """Returns why there is no such module, for the error of its import."""
    parts = name.split(".")
    known = (_MISSING.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    reason = next(filter(None, known), "ft_launcher has nothing of that name")
    return f"{_PEER}.{name} is not there under the alias of ft_launcher: {reason}. Install nvidia-resiliency-ext for it"
