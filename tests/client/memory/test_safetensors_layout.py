"""Headers of files of state: the same as the safetensors library reads, and nothing damaged passes."""

from __future__ import annotations

import zlib

import pytest
import safetensors.torch
import torch

from ft_client.memory import safetensors_layout
from ft_client.memory.safetensors_layout import DamagedFile, FileLayout, TensorSpec

SPECS = {
    "byte": TensorSpec("U8", (3,)),
    "half": TensorSpec("BF16", (2, 5)),
    "number": TensorSpec("F64", ()),
    "none": TensorSpec("F32", (0, 4)),
    "many": TensorSpec("F32", (7, 3)),
}
METADATA = {"step": "12", "rank": "0"}


def written(layout: FileLayout, metadata: dict[str, str] = METADATA) -> bytes:
    data = bytes(index % 251 for index in range(layout.size - layout.data_offset))
    return safetensors_layout.header(layout, metadata, 11, zlib.crc32(data)) + data


def test_a_header_says_what_was_planned() -> None:
    layout = safetensors_layout.plan(SPECS, METADATA, plain_room=64)
    content = written(layout)
    length = safetensors_layout.header_bytes(content[:8], len(content))
    parsed = safetensors_layout.parse(content[:length], len(content))
    assert parsed.tensors == layout.tensors
    assert parsed.data_offset == layout.data_offset == length
    assert parsed.plain_state == (layout.tensors_end, layout.tensors_end + 11)
    assert METADATA.items() <= parsed.metadata.items()


def test_each_tensor_is_aligned_to_its_elements_and_there_are_no_gaps() -> None:
    layout = safetensors_layout.plan(SPECS, METADATA, plain_room=64)
    assert layout.data_offset % 4096 == 0
    at = layout.data_offset
    for place in layout.tensors.values():
        assert place.offset == at
        assert place.offset % safetensors_layout.ITEM_BYTES[place.spec.kind] == 0
        at += place.spec.size
    assert at == layout.tensors_end


def test_the_safetensors_library_reads_it() -> None:
    layout = safetensors_layout.plan(SPECS, METADATA, plain_room=64)
    content = written(layout)
    tensors = safetensors.torch.load(content)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **{name: spec.shape for name, spec in SPECS.items()},
        safetensors_layout.PLAIN_STATE: (64,),
    }
    assert tensors["half"].dtype == torch.bfloat16
    place = layout.tensors["byte"]
    assert bytes(tensors["byte"].tolist()) == content[place.offset : place.offset + 3]


def test_a_later_header_fits_into_the_room_of_the_first() -> None:
    layout = safetensors_layout.plan(SPECS, METADATA, plain_room=64)
    assert len(safetensors_layout.header(layout, {"step": "9" * 18, "rank": "9" * 9}, 64, 0)) == layout.data_offset
    with pytest.raises(ValueError, match="there is room for"):
        safetensors_layout.header(layout, {"step": "9" * 8000}, 64, 0)


def test_a_header_that_no_reader_accepts_is_refused_before_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = safetensors_layout.plan(SPECS, METADATA, plain_room=64)
    monkeypatch.setattr(safetensors_layout, "MAX_HEADER_BYTES", plan.data_offset - 8)
    assert safetensors_layout.plan(SPECS, METADATA, plain_room=64) == plan
    monkeypatch.setattr(safetensors_layout, "MAX_HEADER_BYTES", plan.data_offset - 9)
    with pytest.raises(safetensors_layout.HeaderTooLong, match="are the most"):
        safetensors_layout.plan(SPECS, METADATA, plain_room=64)


def test_a_flipped_bit_anywhere_in_the_header_is_found() -> None:
    layout = safetensors_layout.plan(SPECS, METADATA, plain_room=64)
    content = written(layout)
    for index in range(layout.data_offset):
        damaged = bytearray(content)
        damaged[index] ^= 1 << (index % 8)
        with pytest.raises(DamagedFile):
            length = safetensors_layout.header_bytes(bytes(damaged[:8]), len(damaged))
            safetensors_layout.parse(bytes(damaged[:length]), len(damaged))


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 4096, -64, -1])
def test_a_file_that_was_cut_off_is_found(cut: int) -> None:
    content = written(safetensors_layout.plan(SPECS, METADATA, plain_room=64))[:cut]
    with pytest.raises(DamagedFile):
        length = safetensors_layout.header_bytes(content[:8], len(content))
        safetensors_layout.parse(content[:length], len(content))


def test_a_longer_file_is_refused() -> None:
    content = written(safetensors_layout.plan(SPECS, METADATA, plain_room=64))
    length = safetensors_layout.header_bytes(content[:8], len(content))
    with pytest.raises(DamagedFile, match="its header says"):
        safetensors_layout.parse(content[:length], len(content) + 1)


def test_a_header_of_the_safetensors_library_is_not_one_of_ours() -> None:
    content = safetensors.torch.save({"a": torch.zeros(3)})
    length = safetensors_layout.header_bytes(content[:8], len(content))
    with pytest.raises(DamagedFile):
        safetensors_layout.parse(content[:length], len(content))
