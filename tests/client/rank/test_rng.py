"""Random numbers come again, also after a way through JSON."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from ft_client.rank import rng


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), float(np.random.randn()), float(torch.randn(()))]


@pytest.mark.parametrize("through_json", [False, True])
@pytest.mark.parametrize("before", range(3))
def test_the_same_again(through_json: bool, before: int) -> None:
    assert np.random  # numpy loads it when it is first used; only from then on its state is kept
    for _ in range(before):
        draw()
    state = rng.save()
    if through_json:
        state = rng.from_json(json.loads(json.dumps(rng.to_json(state))))
    first = [draw() for _ in range(5)]
    rng.restore(state)
    assert [draw() for _ in range(5)] == first


def test_saving_draws_nothing() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    rng.save()
    assert random.random() == expected
