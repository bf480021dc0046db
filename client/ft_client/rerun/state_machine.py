"""`RerunStateMachine`, which carries out the transitions of a step in a rank, and the one machine of this process.

Scripts and Megatron-LM-like trainers call it, in the thread that runs the steps. Who does what:

- `transitions.py` decides the next state of a step, and what to do, from the votes of all ranks.
- `RerunStateMachine`, here, asks the other ranks, and carries that out: it restores random numbers, data and state.
- `validation.py` runs the checks, and finds what a rerun says of a result that was rejected.
- `checkpoint.py` has the form of the machine's part of a checkpoint.

The votes go over the default process group, by one reduction for each run of a step, in which preemption's flag may
ride. Without a group a rank is alone. `RerunStateMachineConfig` makes the machine of this process, and gives it the
usual checks of a loss.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ft_client.rank import rng
from ft_client.rank.agreement import group
from ft_client.rerun import checkpoint, unexpected_result
from ft_client.rerun.checkpoint import Checkpoint
from ft_client.rerun.data_iterator import RerunDataIterator, as_iterators, keep_microbatches
from ft_client.rerun.injector import RerunErrorInjector
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.result import Check, Result, check_callable, check_large, choice, number
from ft_client.rerun.result_statistics import LargestSeen
from ft_client.rerun.transitions import (
    COMPUTING,
    IN_DOUBT,
    RERUNNING,
    RerunAction,
    RerunMode,
    RerunState,
    Votes,
    ending,
    transition,
    votes_count,
)
from ft_client.rerun.unexpected_result import Device
from ft_client.rerun.validation import Validation

logger = logging.getLogger(__name__)


class RerunStateMachine:
    """Computes a step again when a check rejects a result, and tells transient, persistent and correct results apart.

    All ranks of the default group must call it alike, since its calls are collectives. The example is in the package's
    docstring.

    Args:
        state_save_func: returns what a run of a step changes beside random numbers and data. The optimizer's step comes
            after the checks, so its state need not be there.
        state_restore_func: gets what `state_save_func` returned, and restores it before a rerun.
        mode: a `RerunMode` or its value.
        error_injector: spoils results on purpose, for tests of the whole way.
        result_rejected_tracker_filename: a file to which each unexpected result is appended; None: none.
        node_name: the name of this node in the checkpoint; None: the host's name.

    Attributes:
        state: where the present step is.
        mode: what the machine is for; changed by `set_mode`.
        current_iteration: counts steps from 0. May be set between steps.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    def __init__(
        self,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        mode: RerunMode | str = RerunMode.DISABLED,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | Path | None = None,
        node_name: str | None = None,
    ) -> None:
        check_callable("state_save_func", state_save_func)
        check_callable("state_restore_func", state_restore_func)
        if (state_save_func is None) != (state_restore_func is None):
            raise ValueError("state_save_func and state_restore_func: give both, or none")
        if error_injector is not None and not isinstance(error_injector, RerunErrorInjector):
            raise TypeError(f"error_injector={error_injector!r} is not a RerunErrorInjector")
        self.state = RerunState.NOT_RUNNING_YET
        self.current_iteration = -1
        self.set_mode(mode)
        self._save_user = state_save_func or (lambda: None)
        self._restore_user = state_restore_func or (lambda state: None)
        if result_rejected_tracker_filename is None:
            tracker_file = None
        else:
            tracker_file = str(result_rejected_tracker_filename)
        self._validation = Validation(error_injector or RerunErrorInjector(), tracker_file, node_name)
        self._largest = LargestSeen()
        self._loaded: Checkpoint | None = None
        self._thread: int | None = None

    get_skipped_iterations_from_tracker_file = staticmethod(unexpected_result.get_skipped_iterations_from_tracker_file)

    def get_mode(self) -> RerunMode:
        """Returns `mode`."""
        return self.mode

    def set_mode(self, mode: RerunMode | str) -> None:
        """Changes the mode between steps: disabled for an evaluation, so that its data are not kept, and back.

        Raises:
            ValueError: naming the argument.
            RuntimeError: in the middle of a step.
        """
        chosen = choice("mode", mode, RerunMode)
        if self.state in COMPUTING:
            raise RuntimeError(f"mode={chosen.value!r}: a step is being computed; change the mode after it")
        self.mode = chosen
        self._saved: tuple[rng.RngState, Any] | None = None
        keep_microbatches(chosen is not RerunMode.DISABLED)

    @property
    def diagnostic(self) -> RerunDiagnostic | None:
        """What a rerun said of this rank's unexpected result in the present step; None: no result, or no rerun yet."""
        return self._validation.diagnostic

    @property
    def suspect(self) -> Device | None:
        """Where this rank computed its unexpected result of the present step; None when it had none."""
        failure = self._validation.failure
        if failure:
            return failure.computed_at
        return None

    def should_run_forward_backward(
        self, data_iterator: RerunDataIterator[Any] | list[RerunDataIterator[Any]] | None
    ) -> bool:
        """Returns whether to compute the step (again): `while machine.should_run_forward_backward(data_iterator): ...`.

        Called before each run of the step's body, and once after the last. A collective of all ranks at the end of each
        run. Restores random numbers, user state and data before a rerun. Rank 0 logs why the step is computed again.

        Args:
            data_iterator: where the step's microbatches come from: one iterator, one for each stage, or None.

        Raises:
            TypeError, ValueError: naming `data_iterator`.
            RuntimeError: called in another thread than before.
        """
        iterators = as_iterators(data_iterator, self.mode is not RerunMode.DISABLED)
        self._check_thread()
        votes = self._validation.votes
        if votes_count(self.state, self.mode):
            if self.state in RERUNNING:
                self._validation.end_rerun()
            votes = Votes(*map(bool, group.max_over_ranks(votes)))
        then = transition(self.state, self.mode, votes)
        if then.reason and group.rank() == 0:
            logger.warning("Rerun at iteration #%d: %s", self.current_iteration, then.reason)
        for action in then.actions:
            self._perform(action, iterators)
        self.state = then.state
        self._validation.begin_run()
        return then.run

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Returns whether to save a checkpoint, whether to exit, and the exit code. Alike on all ranks.

        Called after the loop of `should_run_forward_backward`. The caller saves and exits. The codes:

        - 16: a job on other hardware has to compute the step from this checkpoint.
        - 17: a device gave a wrong result. The checkpoint is from before the step, which the next job computes once.
        - 0: nothing to do.
        """
        return ending(self.state)

    def validate_result(
        self,
        result: Result,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], Any] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Checks one result of the step. Between steps nothing is checked, unless the machine is disabled.

        A result that is rejected in the step's first run makes all ranks compute the step again, at the next
        `should_run_forward_backward`. Waits for the device, where `result` is on one.

        Args:
            result: a number or a tensor of one element.
            rejection_func: takes `result`, and returns whether it is unexpected.
            message: what an unexpected result means, for the log.
            comparison_func: takes two results, and returns how far they are apart; None: their relative difference.
            tolerance: results up to so far apart count as the same.
            fatal: whether a result that is reproducible is worth an exit with code 16; if not, training goes on.

        Raises:
            TypeError, ValueError: naming the argument.
            RuntimeError: `comparison_func` raised; the machine is used in two threads; or the machine is disabled and
                a fatal result is rejected.
        """
        check = Check(result, rejection_func, message, comparison_func, tolerance, fatal)
        self._check_thread()
        if self.state not in COMPUTING and self.mode is not RerunMode.DISABLED:
            return
        caller = sys._getframe(1)
        call = self._validation.call_at(f"{caller.f_code.co_filename.rpartition('/')[2]}:{caller.f_lineno}")
        is_rerun = self.state in RERUNNING
        if self.mode is RerunMode.DISABLED:
            failure = self._validation.only_run(call, check, self.current_iteration)
            if failure and fatal:
                raise RuntimeError(str(failure))
        elif self.mode is RerunMode.REPORT_STATS:
            self._validation.note(call, check, is_rerun)
        elif is_rerun:
            other_hardware = self.state is RerunState.RERUNNING_FROM_CHECKPOINT
            self._validation.rerun(call, check, self.current_iteration, other_hardware)
        else:
            self._validation.first_run(call, check, self.current_iteration)

    def is_unexpectedly_large(
        self, result: Result, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Returns whether |result| is above `threshold` x the largest of the first `num_samples` results of `context`.

        Used in a `rejection_func`, for a gradient's norm for instance. NaN and infinities are not large: another check
        has to reject them. The samples are this rank's own, and are kept in checkpoints.

        Args:
            result: a number or a tensor of one element.
            threshold: how many times the largest sample is still expected.
            context: names the kind of result.
            num_samples: how many results are samples. While they are collected, nothing is large.
            resample: whether to drop the samples of `context`, and begin anew with this result.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        check_large(result, threshold, num_samples)
        counts = self.state not in RERUNNING
        return self._largest.is_large(number(result), threshold, context, num_samples, resample, counts)

    def state_dict(self, data_iterator: Any = None, ckpt_format: str = "torch", force: bool = True) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint: JSON, and the microbatches of a step that will be computed again.

        Args:
            data_iterator: as given to `should_run_forward_backward`.
            ckpt_format: each rank saves and loads its own dict; in Megatron's "torch_dist" it is a sharded object.
            force: accepted for compatibility.
        """
        state, iteration = checkpoint.state_to_save(self.state, self.current_iteration)
        unfinished = self.state is not RerunState.NOT_RUNNING_YET
        if unfinished and self._saved:
            random = rng.to_json(self._saved[0])
        else:
            random = None
        data = [iterator.state_dict() for iterator in as_iterators(data_iterator, self.mode is not RerunMode.DISABLED)]
        if self._loaded is not None:
            random, data = self._loaded.rng, self._loaded.data_iterators
        world_size, rank = group.size(), group.rank()
        form = Checkpoint(
            state=state,
            current_iteration=iteration,
            world_size=world_size,
            rank=rank,
            failure=self._validation.failure,
            rng=random,
            largest=self._largest.state_dict(),
            data_iterators=data,
        ).to_dict()
        return checkpoint.part_of(form, ckpt_format, world_size, rank)

    def validate_state_dict(self, state_dict: Any) -> bool:
        """Returns whether `load_state_dict` would accept `state_dict`. If not, the log says why."""
        try:
            checkpoint.read(state_dict, group.size(), group.rank())
        except ValueError as error:
            logger.warning("the rerun state is not resumed: %s", error)
            return False
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint. Data and random numbers are restored at the next step, which has the iterators.

        A step in doubt is computed again. Only a machine of mode `validate_results` also judges the result; for any
        other the step is a new one, and stays in doubt.

        Raises:
            ValueError: naming `state_dict`: of another world size, of another rank, or of another form.
        """
        loaded = checkpoint.read(state_dict, group.size(), group.rank())
        if loaded.state in IN_DOUBT and self.mode is not RerunMode.VALIDATE_RESULTS:
            logger.warning("mode=%s: iteration #%d stays in doubt", self.mode.value, loaded.current_iteration)
            loaded = checkpoint.as_new_step(loaded)
        self.state = loaded.state
        self.current_iteration = loaded.current_iteration
        self._validation.failure = loaded.failure
        self._loaded = loaded
        self._largest.load_state_dict(loaded.largest)
        if loaded.state in IN_DOUBT:
            before = unexpected_result.ran_before()
        else:
            before = None
        if before is not None and group.rank() == 0:
            logger.warning("The launcher moved this job: rank %d ran on %s before", *before)

    def _check_thread(self) -> None:
        """Raises RuntimeError in a second thread of Python: two threads would make the ranks' collectives out of order.

        Threads of torch may call: a device's backward pass runs in them, while the training's own thread waits.
        """
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        elif me != self._thread and not isinstance(threading.current_thread(), threading._DummyThread):
            name = threading.current_thread().name
            raise RuntimeError(f"the rerun machine is used in a second thread, {name!r}: one thread runs the steps")

    def _perform(self, action: RerunAction, iterators: list[RerunDataIterator[Any]]) -> None:
        """Carries out one action of a transition. REPORT is a collective."""
        match action:
            case RerunAction.RESUME:
                loaded = self._loaded
                self._loaded = None
                checkpoint.resume(loaded, iterators)
            case RerunAction.BEGIN:
                self.current_iteration += 1
                self._validation.begin_step()
            case RerunAction.SAVE:
                self._saved = (rng.save(), self._save_user())
            case RerunAction.RESTORE if self._saved is not None:
                rng.restore(self._saved[0])
                self._restore_user(self._saved[1])
            case RerunAction.REWIND:
                for iterator in iterators:
                    iterator.rewind()
            case RerunAction.ADVANCE:
                for iterator in iterators:
                    iterator.advance()
            case RerunAction.REPORT if self._validation.variability.is_due():
                texts = group.union_over_ranks([self._validation.variability.to_text(group.rank())])
                if group.rank() == 0:
                    for line in self._validation.variability.report(texts):
                        logger.info("%s", line)


_machine: RerunStateMachine | None = None


def initialize_rerun_state_machine(**arguments: Any) -> RerunStateMachine:
    """Makes the machine of this process, in place of an earlier machine. The arguments are `RerunStateMachine`'s.

    Each call makes a new machine, so that a function that in-process restart calls again starts afresh.
    """
    global _machine
    _machine = RerunStateMachine(**arguments)
    return _machine


def get_rerun_state_machine() -> RerunStateMachine:
    """Returns the machine of this process. Makes a disabled one where none was made."""
    if _machine is None:
        return initialize_rerun_state_machine()
    return _machine


def destroy_rerun_state_machine() -> None:
    """Drops the machine of this process, for tests."""
    global _machine
    _machine = None
    keep_microbatches(True)


@dataclass(frozen=True)
class RerunStateMachineConfig:
    """The settings of the machine of this process and of its checks of a loss, by their documented names.

    NaN in a loss is fatal; sudden growth is not.

    `error_injection_rate`: one in so many checks. `spiky_loss_factor`: times the largest of the first 100 losses.
    """

    rerun_mode: RerunMode | str = "disabled"
    check_for_nan_in_loss: bool = True
    check_for_spiky_loss: bool = False
    spiky_loss_factor: float = 10.0
    error_injection_rate: int = 0
    error_injection_type: RerunDiagnostic | str = "transient_error"

    def __post_init__(self) -> None:
        """Checks the factor; raises ValueError."""
        factor: object = self.spiky_loss_factor
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"spiky_loss_factor={factor!r} is not a finite number above 0")

    def initialize(self, **arguments: Any) -> RerunStateMachine:
        """Makes and returns the machine of this process; further arguments are `RerunStateMachine`'s."""
        injector = RerunErrorInjector(self.error_injection_rate, self.error_injection_type)
        return initialize_rerun_state_machine(mode=self.rerun_mode, error_injector=injector, **arguments)

    def validate_loss(self, loss: Result) -> None:
        """Checks `loss` by the machine of this process, as the settings say."""
        machine = get_rerun_state_machine()
        if self.check_for_nan_in_loss:
            machine.validate_result(loss, _is_nan, "loss is NaN")
        if self.check_for_spiky_loss:
            large = partial(machine.is_unexpectedly_large, threshold=self.spiky_loss_factor, context="loss")
            machine.validate_result(loss, large, "loss is unexpectedly large", fatal=False)


def _is_nan(loss: Result) -> bool:
    if isinstance(loss, torch.Tensor):
        return bool(torch.isnan(loss))
    return math.isnan(loss)
