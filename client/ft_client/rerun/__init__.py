"""Rerun: a step with an unexpected result is computed again, to tell a fault that passed from one that stays.

Everything public by its documented name, loaded when it is used: importing this package imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_client.rerun.data_iterator import RerunDataIterator
    from ft_client.rerun.injector import RerunErrorInjector
    from ft_client.rerun.judgement import RerunDiagnostic
    from ft_client.rerun.loss_check import RerunStateMachineConfig
    from ft_client.rerun.machine import (
        EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
        EXIT_CODE_RESUME_TO_DISAMBIGUATE,
        RerunMode,
        RerunState,
    )
    from ft_client.rerun.of_process import (
        destroy_rerun_state_machine,
        get_rerun_state_machine,
        initialize_rerun_state_machine,
    )
    from ft_client.rerun.state_machine import RerunStateMachine
    from ft_client.rerun.told import ran_before

__all__ = [
    "EXIT_CODE_FAILED_ON_RESULT_VALIDATION",
    "EXIT_CODE_RESUME_TO_DISAMBIGUATE",
    "RerunDataIterator",
    "RerunDiagnostic",
    "RerunErrorInjector",
    "RerunMode",
    "RerunState",
    "RerunStateMachine",
    "RerunStateMachineConfig",
    "destroy_rerun_state_machine",
    "get_rerun_state_machine",
    "initialize_rerun_state_machine",
    "ran_before",
]

_HOMES = {
    "EXIT_CODE_FAILED_ON_RESULT_VALIDATION": "machine",
    "EXIT_CODE_RESUME_TO_DISAMBIGUATE": "machine",
    "RerunDataIterator": "data_iterator",
    "RerunDiagnostic": "judgement",
    "RerunErrorInjector": "injector",
    "RerunMode": "machine",
    "RerunState": "machine",
    "RerunStateMachine": "state_machine",
    "RerunStateMachineConfig": "loss_check",
    "ran_before": "told",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'of_process')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
