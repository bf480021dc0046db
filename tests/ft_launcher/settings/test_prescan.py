"""The look at a command line before torch is there."""

from __future__ import annotations

import os

import pytest

from ft_launcher.settings import prescan
from ft_launcher.settings.prescan import Scan
from tests.program import python


@pytest.mark.parametrize(
    ("words", "environ", "ranks"),
    [
        ("train.py", {}, 1),
        ("--nproc-per-node 4 train.py", {}, 4),
        ("--nproc_per_node=4 train.py", {}, 4),
        ("--nproc-per-nod 4 train.py", {}, 4),
        ("--nproc_per=4 train.py", {}, 4),
        ("--standal --nproc-per-nod 4 train.py", {}, 4),
        ("--nproc-per-node=4 --standalone --nproc-per-node=2 train.py", {}, 2),
        ("-m --nproc-per-node 4 pytest", {}, 4),
        ("--ft-param-rank_heartbeat_timeout 30 --nproc-per-node 4 train.py", {}, 4),
        ("--ft-dump-stacks --nproc-per-node 4 train.py", {}, 4),
        ("train.py --nproc-per-node 4", {}, 1),
        ("-- train.py --nproc-per-node=4", {}, 1),
        ("--nproc-per-node cpu train.py", {}, len(os.sched_getaffinity(0))),
        ("--nproc-per-node npu train.py", {}, None),
        ("train.py", {"PET_NPROC_PER_NODE": "8"}, 8),
        ("--nproc-per-node 2 train.py", {"PET_NPROC_PER_NODE": "8"}, 2),
        ("--nproc-per-node", {}, None),
    ],
)
def test_ranks_per_node(words: str, environ: dict[str, str], ranks: int | None) -> None:
    assert prescan.scan(words.split(), environ).ranks == ranks


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("train.py", True),
        ("train.py --help", True),
        ("--nnodes 2 train.py --ft-dry-run", True),
        ("--ft-dry-run train.py", False),
        ("--ft_dry_run=true train.py", False),
        ("--ft-dry-run=false train.py", True),
        ("--help", False),
        ("--nnodes 2", False),
        ("--ft-no-such-option train.py", False),
    ],
)
def test_whether_ranks_will_be_started(words: str, starts: bool) -> None:
    assert prescan.scan(words.split(), {}).starts_ranks is starts


@pytest.mark.parametrize(
    ("guess", "environ", "ranks", "after", "says"),
    [
        (4, {}, 4, "1", True),
        (1, {}, 1, None, False),
        (4, {"OMP_NUM_THREADS": "3"}, 4, "3", False),
        (None, {}, 4, "1", True),
        (4, {}, 1, None, False),
    ],
)
def test_threads_are_set_before_torch_and_put_right_after(
    guess: int | None, environ: dict[str, str], ranks: int, after: str | None, says: bool
) -> None:
    seen = prescan.prepare_threads(Scan(guess, starts_ranks=True), environ)
    line = prescan.settle_threads(seen, ranks, environ)
    assert (environ.get("OMP_NUM_THREADS"), line is not None) == (after, says)


def test_torch_is_not_imported_before_the_command_line_is_parsed() -> None:
    code = (
        "import sys, ft_launcher, ft_launcher.cli; sys.exit(bool({'torch', 'yaml', 'click', 'numpy'} & {*sys.modules}))"
    )
    python(code)
