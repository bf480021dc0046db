"""The form of the machine's part of a checkpoint: JSON, read back, and refused where it does not fit."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

from ft_client.rerun import RerunDataIterator, RerunDiagnostic, RerunState, transitions
from ft_client.rerun.checkpoint import Checkpoint, as_new_step, read, resume, state_to_save
from ft_client.rerun.unexpected_result import Device, UnexpectedResult, ValidationCall

FAILURE = UnexpectedResult(
    ValidationCall("train.py:7", 2),
    1,
    150,
    "loss is NaN",
    float("nan"),
    True,
    Device("a", "cuda:GPU-1"),
    RerunDiagnostic.CORRECT_RESULT,
)
IN_DOUBT = Checkpoint(RerunState.WILL_RERUN_FROM_CHECKPOINT, 150, 4, 1, FAILURE)


def through_json(checkpoint: Checkpoint) -> Any:
    return json.loads(json.dumps(checkpoint.to_dict(), allow_nan=False))


def test_as_json_and_as_torch_saves_it() -> None:
    assert repr(read(through_json(IN_DOUBT), 4, 1)) == repr(IN_DOUBT)
    file = io.BytesIO()
    torch.save(IN_DOUBT.to_dict(), file)
    file.seek(0)
    assert repr(read(torch.load(file, weights_only=True), 4, 1)) == repr(IN_DOUBT)


def test_another_world_size() -> None:
    with pytest.raises(ValueError, match="state_dict: saved by a world_size of 4, this job has 2"):
        read(through_json(IN_DOUBT), 2, 1)


def test_another_ranks_doubt() -> None:
    with pytest.raises(ValueError, match="state_dict: saved by rank 1, this is rank 0"):
        read(through_json(IN_DOUBT), 4, 0)
    assert read(through_json(as_new_step(IN_DOUBT)), 4, 0).current_iteration == 149


@pytest.mark.parametrize("key", list(IN_DOUBT.to_dict()))
def test_what_is_incomplete(key: str) -> None:
    form = through_json(IN_DOUBT)
    del form[key]
    with pytest.raises(ValueError, match="state_dict"):
        read(form, 4, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"version": 99},
        through_json(IN_DOUBT) | {"state": "?"},
        through_json(IN_DOUBT) | {"failure": {"a": 1}},
    ],
)
def test_what_is_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match="state_dict"):
        read(wrong, 4, 1)


@pytest.mark.parametrize("state", list(RerunState))
def test_what_a_state_is_saved_as(state: RerunState) -> None:
    """Only a step in doubt stays what it is; another one that is not done is a new step for the next job."""
    saved, iteration = state_to_save(state, 7)
    if state in transitions.IN_DOUBT:
        assert (saved, iteration) == (RerunState.WILL_RERUN_FROM_CHECKPOINT, 7)
    else:
        assert saved is RerunState.NOT_RUNNING_YET
        assert iteration == (7 if state is RerunState.NOT_RUNNING_YET else 6)
    assert state_to_save(*state_to_save(state, 7)) == (saved, iteration)


def test_as_many_iterators_as_there_were() -> None:
    one, other = RerunDataIterator([1]), RerunDataIterator([2])
    next(one)
    loaded = Checkpoint(RerunState.NOT_RUNNING_YET, 0, 1, 0, data_iterators=[one.state_dict(), other.state_dict()])
    with pytest.raises(ValueError, match="data_iterator: 1 iterators, the checkpoint holds the data of 2"):
        resume(loaded, [RerunDataIterator([])])
    again = [RerunDataIterator([8]), RerunDataIterator([9])]
    resume(loaded, again)
    assert [list(iterator) for iterator in again] == [[1, 8], [9]]
    nothing_held = Checkpoint(RerunState.NOT_RUNNING_YET, 0, 1, 0, data_iterators=[other.state_dict()])
    resume(nothing_held, [])
