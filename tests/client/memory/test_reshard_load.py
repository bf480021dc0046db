"""Jobs whose number of ranks changes, over gloo: each goes on with the weights and moments of the one before."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rank_monitor.contract import env, memory_files
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.wire.json_record import write_record
from tests.patience import patient
from tests.program import ROOT, clean_environment

WORKER = "tests.client.memory.reshard_worker"
NEEDS_FSDP = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 of this torch needs a GPU: its streams on a CPU lack events",
)
KINDS = ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)]


class Jobs:
    """Runs one job after the other. `said`: stderr of the ranks of the last one."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._count = 0
        self.said: list[str] = []

    def run(self, nodes: str, steps: int) -> dict[str, Any]:
        """Returns what all ranks have printed alike, which is checked. `nodes`: a letter for each rank."""
        self._count += 1
        processes = [self._start(rank, len(nodes), node, steps) for rank, node in enumerate(nodes)]
        ended = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=patient(120))
                ended.append((process.returncode, out, err))
        finally:
            for process in processes:
                process.kill()
        assert [code for code, _, _ in ended] == [0] * len(nodes), ended
        self.said = [err for _, _, err in ended]
        results = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
        assert results == [results[0]] * len(nodes), self.said
        found: dict[str, Any] = results[0]
        return found

    def _start(self, rank: int, world: int, node: str, steps: int) -> subprocess.Popen[str]:
        folder = self.node(node)
        folder.mkdir(mode=0o700, exist_ok=True)
        arguments = [str(rank), str(world), str(self._folder / f"store{self._count}"), self._kind, str(steps)]
        variables = {
            env.MEMORY_FILES: write_record(MemoryFiles(str(folder), 2, 1 << 30, 1)),
            env.RANK_MONITOR_SOCKET: str(self._folder / f"m{rank}"),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(world),
        }
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            cwd=ROOT,
            env=clean_environment("RANK", "LOCAL_RANK", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def node(self, name: str) -> Path:
        return self._folder / name

    def worlds(self, names: Sequence[str] = ("a",)) -> set[int]:
        """Of how many ranks the whole files of some nodes are."""
        files = [memory_files.state_file(path.name) for name in names for path in self.node(name).iterdir()]
        return {file.world for file in files if file is not None}


def goes_on(before: dict[str, Any], after: dict[str, Any], step: int, world: int) -> None:
    """A job has gone on from the last step of the job before."""
    assert (after["start"], after["world"]) == (step, world)
    assert after["loaded"] == before["saved"]
    assert after["rate"] == before["rate_then"]
    assert after["place"] == 0, "a loader begins anew"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [("aaaa", "aa", "aaa"), ("aabb", "ab", "aab")])
def test_four_ranks_then_two_then_three(tmp_path: Path, kind: str, nodes: tuple[str, str, str]) -> None:
    jobs = Jobs(tmp_path, kind)
    of_four = jobs.run(nodes[0], 2)
    assert (of_four["start"], of_four["world"]) == (0, 0)
    of_two = jobs.run(nodes[1], 3)
    goes_on(of_four, of_two, 2, 4)
    line = "step 2 in memory is of 4 ranks and was put together for 2: random numbers and loader begin anew"
    assert line in jobs.said[0]
    assert jobs.worlds(sorted(set(nodes[0]))) == {2}
    of_three = jobs.run(nodes[2], 1)
    goes_on(of_two, of_three, 5, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_files_stay_until_the_new_job_has_a_generation(tmp_path: Path, kind: str) -> None:
    jobs = Jobs(tmp_path, kind)
    of_four = jobs.run("aaaa", 2)
    for nodes in ("aa", "aa", "aaa"):
        goes_on(of_four, jobs.run(nodes, 0), 2, 4)
        assert jobs.worlds() == {4}
    goes_on(of_four, jobs.run("aa", 1), 2, 4)
    assert jobs.worlds() == {2, 4}


def test_a_state_that_all_have_outlives_a_node(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, "ddp")
    of_four = jobs.run("aabb", 2)
    goes_on(of_four, jobs.run("bb", 0), 2, 4)
    goes_on(of_four, jobs.run("cbb", 0), 2, 4)


def test_one_rank_and_more(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, "ddp")
    alone = jobs.run("a", 2)
    of_two = jobs.run("ab", 2)
    goes_on(alone, of_two, 2, 1)
    goes_on(of_two, jobs.run("a", 0), 4, 2)


@NEEDS_FSDP
def test_a_shard_that_is_lost_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, "fsdp")
    jobs.run("aabb", 2)
    assert jobs.run("bb", 0)["start"] == 0
    assert "is missing, which was written by: 0" in jobs.said[0]


@NEEDS_FSDP
def test_a_file_that_is_damaged_is_never_sent(tmp_path: Path) -> None:
    """Each is verified as a whole before any part of it is used; the older generation is whole."""
    jobs = Jobs(tmp_path, "fsdp")
    jobs.run("aabb", 2)
    (file,) = jobs.node("b").glob("step-2_rank-3-*")
    with file.open("r+b") as content:
        content.seek(-10, 2)
        content.write(b"flipped")
    found = jobs.run("ab", 0)
    assert (found["start"], found["world"]) == (1, 4)
    assert "checksum of its content is wrong" in jobs.said[1]


def test_files_that_do_not_say_what_is_the_same_are_not_taken(tmp_path: Path) -> None:
    """As those of a release before the entry."""
    jobs = Jobs(tmp_path, "ddp")
    jobs.run("aa", 1)
    for path in jobs.node("a").glob("*.safetensors"):
        path.write_bytes(without_entry(path.read_bytes()))
    assert jobs.run("aaa", 0)["start"] == 0
    assert "an earlier release wrote it" in jobs.said[0]


def without_entry(content: bytes) -> bytes:
    """A file whose header lacks the entry, with the right checksum."""
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].replace(b'"replicated"', b'"replacated"')
    begin = text.index(b'"header_crc32":"') + len(b'"header_crc32":"')
    zeros = text[:begin] + b"00000000" + text[begin + 8 :]
    text = text[:begin] + f"{zlib.crc32(zeros):08x}".encode() + text[begin + 8 :]
    return content[:8] + text + content[8 + length :]
