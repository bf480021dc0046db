"""The machine in checkpoints of Megatron's distributed format, by Megatron's own class where that is installed."""

from __future__ import annotations

import math

import pytest

from ft_client.rerun import RerunState, RerunStateMachine


def in_doubt() -> RerunStateMachine:
    """A machine whose first step gave NaN twice."""
    machine = RerunStateMachine(mode="validate_results")
    while machine.should_run_forward_backward(None):
        machine.validate_result(math.nan, math.isnan, "loss is NaN")
    return machine


def test_without_megatron_the_part_is_plain() -> None:
    assert in_doubt().state_dict(ckpt_format="torch_dist") == in_doubt().state_dict()


def test_what_a_sharded_object_held_is_taken() -> None:
    other = RerunStateMachine(mode="validate_results")
    other.load_state_dict({"sharded": in_doubt().state_dict()})
    assert other.state is RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert not other.validate_state_dict({"sharded": None})


def test_with_megatron_each_rank_has_a_sharded_object_of_its_own() -> None:
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping", reason="megatron-core is not installed")
    machine = in_doubt()
    part = machine.state_dict(ckpt_format="torch_dist")["sharded"]
    assert isinstance(part, mapping.ShardedObject)
    assert (part.global_shape, part.global_offset) == ((1,), (0,))
    assert part.data == machine.state_dict()
