"""The guess of the number of ranks, on nodes made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_launcher.settings import prescan
from ft_launcher.settings.prescan import guess_ranks

PROCESSORS = len(os.sched_getaffinity(0))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node without GPUs."""
    monkeypatch.setattr(prescan, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(prescan, "_DEVICES", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidia-uvm", "nvidiactl", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.fixture
def three(bare: Path) -> None:
    """A node with three GPUs, as its driver shows them."""
    for number in range(3):
        gpu = bare / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t H100\nGPU UUID: \t GPU-{number}a-b\nDevice Minor: \t {number}\n")


@pytest.mark.parametrize(
    ("word", "asked", "ranks"),
    [
        ("4", None, 4),
        ("cpu", None, PROCESSORS),
        ("gpu", None, 3),
        ("auto", None, 3),
        ("gpu", "0,2", 2),
        ("gpu", "GPU-1a,GPU-2a", 2),
        ("gpu", "", None),
        ("auto", "", PROCESSORS),
        ("auto", "-1", PROCESSORS),
        ("gpu", "MIG-1", None),
        ("xpu", None, None),
        ("", None, None),
        ("-1", None, None),
    ],
)
@pytest.mark.usefixtures("three")
def test_a_node_with_gpus(word: str, asked: str | None, ranks: int | None) -> None:
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    assert guess_ranks(word, environ) == ranks


@pytest.mark.usefixtures("bare")
def test_a_node_without_gpus() -> None:
    assert (guess_ranks("gpu", {}), guess_ranks("auto", {})) == (None, PROCESSORS)


def test_a_container_that_shows_devices_only(bare: Path) -> None:
    for name in ("nvidia0", "nvidia1"):
        (bare / "dev" / name).touch()
    assert (guess_ranks("gpu", {}), guess_ranks("gpu", {"CUDA_VISIBLE_DEVICES": "1"})) == (2, 1)


def test_this_node_counts_as_torch_does() -> None:
    from torch.distributed.run import determine_local_world_size

    words = ["cpu"] if prescan.gpu_uuids() else ["cpu", "auto"]
    assert [guess_ranks(word, os.environ) for word in words] == [determine_local_world_size(word) for word in words]


def test_a_folder_that_nobody_may_read_is_no_gpu(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prescan, "_GPUS", bare / "dev" / "null")
    monkeypatch.setattr(prescan, "_DEVICES", bare / "dev" / "null")
    assert guess_ranks("gpu", {}) is None
