"""Rerun: a step with an unexpected result is computed again, to tell a fault that passed from one that stays.

Everything public by its documented name, loaded when it is used: importing this package loads none of its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.rerun.data_iterator import RerunDataIterator as RerunDataIterator
    from ft_client.rerun.injector import RerunErrorInjector as RerunErrorInjector
    from ft_client.rerun.judgement import RerunDiagnostic as RerunDiagnostic
    from ft_client.rerun.state_machine import RerunStateMachine as RerunStateMachine
    from ft_client.rerun.state_machine import RerunStateMachineConfig as RerunStateMachineConfig
    from ft_client.rerun.state_machine import destroy_rerun_state_machine as destroy_rerun_state_machine
    from ft_client.rerun.state_machine import get_rerun_state_machine as get_rerun_state_machine
    from ft_client.rerun.state_machine import initialize_rerun_state_machine as initialize_rerun_state_machine
    from ft_client.rerun.transitions import (
        EXIT_CODE_FAILED_ON_RESULT_VALIDATION as EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    )
    from ft_client.rerun.transitions import EXIT_CODE_RESUME_TO_DISAMBIGUATE as EXIT_CODE_RESUME_TO_DISAMBIGUATE
    from ft_client.rerun.transitions import RerunMode as RerunMode
    from ft_client.rerun.transitions import RerunState as RerunState
    from ft_client.rerun.unexpected_result import ran_before as ran_before

_HOMES = {
    "EXIT_CODE_FAILED_ON_RESULT_VALIDATION": ".transitions",
    "EXIT_CODE_RESUME_TO_DISAMBIGUATE": ".transitions",
    "RerunDataIterator": ".data_iterator",
    "RerunDiagnostic": ".judgement",
    "RerunErrorInjector": ".injector",
    "RerunMode": ".transitions",
    "RerunState": ".transitions",
    "RerunStateMachine": ".state_machine",
    "RerunStateMachineConfig": ".state_machine",
    "destroy_rerun_state_machine": ".state_machine",
    "get_rerun_state_machine": ".state_machine",
    "initialize_rerun_state_machine": ".state_machine",
    "ran_before": ".unexpected_result",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
