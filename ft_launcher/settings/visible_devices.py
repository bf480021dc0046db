"""Tells which GPUs CUDA shows to the ranks, and which NIC belongs to each of these GPUs. Pure.

Health checks, `node/ranks/environment.py` and `settings/prescan.py` ask it, some of them before torch is imported. No
driver is called: that might initialize CUDA in the launcher, whose ranks could then not be forked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def visible(asked: str | None, uuids: Sequence[str | None]) -> tuple[list[int], str]:
    """Returns the indices of the GPUs that CUDA will show, and the first entry that names no GPU, where CUDA stops
    reading.

    Args:
        asked: the value of CUDA_VISIBLE_DEVICES: indices, or beginnings of UUIDs; None: all GPUs.
        uuids: the UUID of each GPU of the node, in the driver's order; None where it is not known.

    Example:
        `visible("1,0,9", ["GPU-a", "GPU-b"])` is `([1, 0], "9")`.
    """
    if asked is None:
        return list(range(len(uuids))), ""
    found: list[int] = []
    for entry in (part.strip() for part in asked.split(",")):
        if entry.isdigit():
            # CUDA ignores an invalid entry and all entries after it.
            if int(entry) < len(uuids):
                named = [int(entry)]
            else:
                named = []
        else:
            named = [index for index, uuid in enumerate(uuids) if entry and uuid and uuid.startswith(entry)]
        if len(named) != 1 and entry in ("", "-1"):
            return found, ""
        if len(named) != 1:
            return found, entry
        found += named
    return found, ""


def nics_of(topology: str, gpus: Sequence[str], nics: Mapping[str, str]) -> dict[str, str]:
    """Returns GPU -> its NIC: the first NIC under the nearest bridge that no other GPU has, else the first one there.

    Clouds ship such a file where sysfs does not show the PCI tree. Its form is that of NCCL's topology files: nested
    `pci` elements with a `busid`. GPU and NIC below the same bridge exchange data without the processor.

    Args:
        topology: the text of the file.
        gpus: bus ids.
        nics: name -> bus id.

    Raises:
        ValueError: the text is not such a file.
    """
    from xml.etree import ElementTree as Xml  # few jobs have such a file

    try:
        if topology.lstrip().startswith("<?xml"):
            body = topology.partition("?>")[2]
        else:
            body = topology
        tree = Xml.fromstring(f"<top>{body}</top>")  # files without one root element are in use
    except Xml.ParseError as error:
        raise ValueError(f"no XML: {error}") from None
    above = {child: parent for parent in tree.iter() for child in parent}
    element_at = {busid.lower(): element for element in tree.iter("pci") if (busid := element.get("busid"))}
    if not element_at:
        raise ValueError("no pci element with a busid in it")
    name_at = {busid.lower(): name for name, busid in nics.items()}
    found: dict[str, str] = {}
    for gpu in gpus:
        if gpu.lower() in element_at:
            bridge = above.get(element_at[gpu.lower()])
        else:
            bridge = None
        near: list[str] = []
        while bridge is not None and not near:
            under = [element.get("busid", "").lower() for element in bridge.iter("pci")]
            near = [name_at[busid] for busid in under if busid in name_at]
            bridge = above.get(bridge)
        if near:
            found[gpu] = next((name for name in near if name not in found.values()), near[0])
    return found
