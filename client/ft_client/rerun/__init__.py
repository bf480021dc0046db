"""Rerun: a step with an unexpected result is computed again, to tell a fault that passed from one that stays.

A NaN loss or an absurd gradient may come from the data, from the program, from a passing fault of a device, or from a
device that is broken. A step that is computed again, on the same device and then on another one, tells these apart:

    machine = RerunStateMachine(mode="validate_results")
    while machine.should_run_forward_backward(data_iterator):
        loss = forward_backward(data_iterator)
        machine.validate_result(loss, torch.isnan, "loss is NaN")
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()

Every public name is here, and loaded when it is used: importing this package loads none of its modules. The names are
those of Megatron-LM's rerun state machine. docs/rerun.md is the user's guide; `transitions.py` explains the states.
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
