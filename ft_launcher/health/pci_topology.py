"""Which NIC belongs to which GPU, from an XML file of the PCI tree, as clouds give it where sysfs does not show it.

The form is that of NCCL's topology files: nested `pci` elements with a `busid`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as Xml


def nics_of(topology: str, gpus: Sequence[str], nics: Mapping[str, str]) -> dict[str, str]:
    """The NIC of each GPU: the first under the nearest bridge that no other GPU has, else the first there.

    Args:
        topology: the text of the file.
        gpus: bus ids.
        nics: name -> bus id.

    Raises:
        ValueError: the text is no such file.
    """
    try:
        body = topology.partition("?>")[2] if topology.lstrip().startswith("<?xml") else topology
        tree = Xml.fromstring(f"<top>{body}</top>")  # files without one root element are in use
    except Xml.ParseError as error:
        raise ValueError(f"no XML: {error}") from None
    above = {child: parent for parent in tree.iter() for child in parent}
    place = {busid.lower(): element for element in tree.iter("pci") if (busid := element.get("busid"))}
    if not place:
        raise ValueError("no pci element with a busid in it")
    name_at = {busid.lower(): name for name, busid in nics.items()}
    found: dict[str, str] = {}
    for gpu in gpus:
        bridge = above.get(place[gpu.lower()]) if gpu.lower() in place else None
        near: list[str] = []
        while bridge is not None and not near:
            under = [element.get("busid", "").lower() for element in bridge.iter("pci")]
            near = [name_at[busid] for busid in under if busid in name_at]
            bridge = above.get(bridge)
        if near:
            found[gpu] = next((name for name in near if name not in found.values()), near[0])
    return found
