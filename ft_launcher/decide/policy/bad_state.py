"""Decides whether the state from which a job went on is bad, so that the next cycle goes on from an older one. Pure.

A state in memory may itself be the cause of a fault: a NaN that was saved, a counter beyond the end of the data. Then
each restart from it fails again in the same way. `restart_policy.py` asks here at each fault:

1. `suspicion`: could a bad state have caused this fault, and would the same state cause the same one? The class of the
   fault decides. What comes from outside (a kill, a hang, memory, the network) never counts.
2. `tried`: how often the job has failed in that way from the state that this cycle went on from, before it had saved a
   newer one (`StateTrial`, a part of the history).
3. `to_set_aside`: whether that state, and all later ones, are set aside now.
4. `no_save_until`: the step that the training has to pass before it saves again.

**A newer save ends the trial** (2). A cycle that has saved a newer state has passed the step at which the one before
failed: it proved the state good from which it went on, and the next cycle goes on from the newer state. What it saved
may be hours of good states, which must not be lost for the name of the state that the cycle began from.

**Why saves wait** (4). The first save after a load may be due one step later. The bad state would then be saved once
more, under the next step's number, and loaded in place of the one that has just failed: no state would ever fail twice.
So nothing is saved before the training has passed the step at which it failed. Until then the loaded state is the
newest one. The launcher reads a loss of NaN in what a rank has printed, so the rank may be some steps further when it
is ended, and may come further in the next cycle: for such a fault saves wait for as many steps more as the rank had
made from the loaded state.

**Why it ends.** Each time a state is set aside, the next cycle goes on from an older one or from the checkpoint on disk
(which is never set aside), and nothing new is saved before the training has come further than ever. Each such restart
is charged.
"""

from __future__ import annotations

from ft_launcher.decide.attribution import BAD_LOSS, Fault, FaultClass
from ft_launcher.decide.policy.ended_cycle import CycleLife
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.restart_history import StateTrial
from rank_monitor.contract.same_error import comparable
from rank_monitor.contract.wire.messages import NO_ITERATION

FAILURES = 2
"""So many failures from one state show that it is bad. A single one may be a passing fault of a device."""
_MIN_MORE_STEPS, _MAX_MORE_STEPS = 10, 100
"""Steps by which saves wait longer after a loss of NaN that was read in the output: 100 steps of 1 ms are 0.1 s, in
which the launcher has long read what was printed."""


def suspicion(fault: Fault, life: CycleLife) -> str:
    """Returns what a bad state may have caused, in words that are the same when it happens again; empty: the fault has
    another cause, or nobody can tell whether it is the same one.

    - A loss of NaN or infinity, by `--ft-watch-log-nan=fault`; at whichever step.
    - Exit code 16: a step had an unexpected result again when it was computed a second time (`ft_client.rerun`).
    - An exception of class `user error`, at the same step.
    """
    if fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE:
        return f"exit code {fault.exit_code}"
    if _is_bad_loss(fault):
        return BAD_LOSS
    if fault.fault_class is not FaultClass.USER_ERROR or not fault.error:
        return ""
    if fault.iteration != NO_ITERATION:
        return f"{comparable(fault.error)} at iteration {fault.iteration}"
    if life.step is not None:
        return f"{comparable(fault.error)} after step {life.step}"
    return ""


def tried(before: StateTrial, fault: Fault, life: CycleLife) -> StateTrial:
    """Returns how often the job has failed from the state of the cycle that `fault` ended, with that cycle.

    A failure of another kind in between does not begin the count anew, as long as nothing was saved meanwhile: the
    state is still the newest one.

    Args:
        before: the trial before this cycle.
        life: how the cycle went.
    """
    if life.loaded_step is None:  # it ended before its ranks had looked for a state
        return before
    if life.saved_step > life.loaded_step:
        return StateTrial()
    why = suspicion(fault, life)
    is_same_state = (before.step, before.series) == (life.loaded_step, life.loaded_series)
    if is_same_state and (not why or why == before.suspicion):
        if not why:
            return before
        return StateTrial(before.step, before.series, why, before.failures + 1)
    if not why or not life.loaded_step:
        return StateTrial()
    return StateTrial(life.loaded_step, life.loaded_series, why, 1)


def to_set_aside(trial: StateTrial, fault: Fault, life: CycleLife, would_end: bool) -> bool:
    """Returns whether the state of the trial is set aside. Where the job would end otherwise, one failure is enough.

    Args:
        trial: with the cycle that `fault` ended.
        life: how that cycle went.
        would_end: whether the job would end now, since the same error, a lack of progress or exit code 16 would.
    """
    return _is_failure_of(trial, fault, life) and (trial.failures >= FAILURES or would_end)


def not_to_keep(trial: StateTrial, fault: Fault, life: CycleLife) -> int:
    """Returns the step from which on states are not kept for a next start, where `fault` ends the job; 0: all are.

    One failure from a state is enough here: a next start would begin with it. After a loss of NaN or exit code 16 in a
    cycle that has saved states, any of these may be bad, but not the one that the cycle went on from.

    Args:
        trial: with the cycle that `fault` ended.
        life: how that cycle went.
    """
    if _is_failure_of(trial, fault, life):
        return trial.step
    if suspicion(fault, life) and (_is_bad_loss(fault) or fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE):
        return (life.loaded_step or 0) + 1
    return 0


def no_save_until(before: int, fault: Fault, life: CycleLife) -> int:
    """Returns the step that the training has to pass in the next cycles before a state is saved; 0: none.

    The step never goes back: where the training fails again before it has passed the step of an earlier fault, saves
    wait for that one.

    Args:
        before: what this returned for the fault before.
        life: how the cycle went. A fault that no bad state can have caused changes nothing, nor does one of a training
            that has not said its steps.
    """
    if life.step is None or not suspicion(fault, life):
        return before
    until = max(life.step, life.last_step)
    if _is_bad_loss(fault):
        until += min(max(until - (life.loaded_step or 0), _MIN_MORE_STEPS), _MAX_MORE_STEPS)
    return max(before, until)


def _is_failure_of(trial: StateTrial, fault: Fault, life: CycleLife) -> bool:
    """Returns whether a cycle went on from the state on trial, and failed as the ones before did."""
    is_from_it = trial.failures > 0 and (life.loaded_step, life.loaded_series) == (trial.step, trial.series)
    return is_from_it and suspicion(fault, life) == trial.suspicion


def _is_bad_loss(fault: Fault) -> bool:
    return fault.error.partition(" at ")[0] == BAD_LOSS
