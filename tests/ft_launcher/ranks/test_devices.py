"""Which GPUs the ranks of a node see once a result of one is in doubt: tables."""

from __future__ import annotations

import pytest

from ft_launcher.ranks.devices import Relocation, another_device
from rank_monitor.contract.wire.messages import ResultInDoubt

UUIDS = ["GPU-a", "GPU-b", "GPU-c", None]


@pytest.mark.parametrize(
    ("device", "ranks", "asked", "former", "seen"),
    [
        ("cuda:b", 2, "0,1,2", "", "GPU-a,GPU-c"),
        ("cuda:GPU-b", 2, "0,1,2", "", "GPU-a,GPU-c"),
        ("cuda:b", 3, "0,1,2", "", "GPU-b,GPU-c,GPU-a"),
        ("cuda:a", 2, "2,0", "", "GPU-a,GPU-c"),
        ("cuda:a", 2, "0,1,2", "GPU-a,GPU-c", "GPU-c,GPU-a"),
        ("cuda:b", 1, "0", "", None),
        ("cuda:a", 1, "0", "", None),
        ("cuda:a", 1, "GPU-a,GPU-b", "", "GPU-b"),
        ("cuda:a", 4, None, "", None),
        ("cuda:0", 2, "0,1,2", "", None),
        ("cpu", 2, "0,1,2", "", None),
    ],
)
def test_what_they_see(device: str, ranks: int, asked: str | None, former: str, seen: str | None) -> None:
    doubt = ResultInDoubt("reproducible", 1, 7, "a", device)
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    found = another_device(doubt, ranks, environ, UUIDS, Relocation(None, former))
    assert found == (None if seen is None else Relocation(doubt, seen))


def test_without_a_doubt_or_gpus_nothing_moves() -> None:
    assert another_device(None, 1, {}, ["GPU-a", "GPU-b"], Relocation()) is None
    assert another_device(ResultInDoubt("reproducible", 1, 7, "a", "cuda:a"), 1, {}, [], Relocation()) is None
