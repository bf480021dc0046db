"""CUDA_VISIBLE_DEVICES as CUDA reads it, and NICs of GPUs by topology files in the forms that are in use."""

from __future__ import annotations

import pytest

from ft_launcher.settings.visible_devices import nics_of, visible

ONE_BRIDGE = """
<cpu numaid="0"><pci busid="ffff:01:00.0">
  <pci busid="g0"/><pci busid="n0"/><pci busid="G1"/><pci busid="N1"/>
</pci></cpu>
<cpu numaid="1"><pci busid="ffff:02:00.0"><pci busid="g2"/><pci busid="n2"/><pci busid="g3"/></pci></cpu>
"""
NESTED = """<?xml version='1.0'?>
<system><cpu><pci busid="root">
  <pci busid="a"><pci busid="g0"/></pci><pci busid="b"><pci busid="g1"/><pci busid="n1"/></pci>
  <pci busid="c"><pci busid="n0"/></pci>
</pci></cpu></system>
"""
NICS = {"mlx5_0": "n0", "mlx5_1": "n1", "mlx5_2": "N2"}
UUIDS = ["GPU-aa11", "GPU-ab22", None, "GPU-cc33"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ([0, 1, 2, 3], "")),
        ("", ([], "")),
        ("-1", ([], "")),
        ("0", ([0], "")),
        ("3,1", ([3, 1], "")),
        (" 2 , 0", ([2, 0], "")),
        ("1,-1,2", ([1], "")),
        ("1,9,2", ([1], "9")),
        ("GPU-ab22", ([1], "")),
        ("GPU-c,0", ([3, 0], "")),
        ("GPU-a", ([], "GPU-a")),
        ("MIG-1234", ([], "MIG-1234")),
    ],
)
def test_visible(asked: str | None, found: tuple[list[int], str]) -> None:
    assert visible(asked, UUIDS) == found


@pytest.mark.parametrize(
    ("topology", "gpus", "found"),
    [
        (ONE_BRIDGE, ["g0", "g1"], {"g0": "mlx5_0", "g1": "mlx5_1"}),
        (ONE_BRIDGE, ["g1"], {"g1": "mlx5_0"}),
        (ONE_BRIDGE, ["g2", "g3"], {"g2": "mlx5_2", "g3": "mlx5_2"}),
        (ONE_BRIDGE, ["g9"], {}),
        (NESTED, ["g1", "g0"], {"g1": "mlx5_1", "g0": "mlx5_0"}),
    ],
)
def test_nics_of_gpus(topology: str, gpus: list[str], found: dict[str, str]) -> None:
    assert nics_of(topology, gpus, NICS) == found


@pytest.mark.parametrize("text", ["GPU0 PIX NIC0", "<system/>", "<cpu", ""])
def test_no_topology(text: str) -> None:
    with pytest.raises(ValueError, match=r"no XML|no pci element"):
        nics_of(text, ["g0"], NICS)
