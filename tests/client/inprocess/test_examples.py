"""The examples of the guide, under each kind of start that it names."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rank_monitor.contract.processes.sweep import processes_of
from tests.patience import patient, until
from tests.ports import free_port
from tests.program import ONE_TRY, clean_environment, started

EXAMPLES = Path(__file__).resolve().parents[3] / "scripts" / "examples"
LIMIT_S = 300.0
MARK = "IN_PROCESS_EXAMPLE"
LAUNCHERS = {"ft_launcher": ["-m", "ft_launcher"], "torchrun": ["-m", "torch.distributed.run"]}
OTHERS = ("torchrun", "variables")


def outputs(start: str, ranks: int, words: Sequence[str], folder: Path) -> str:
    """What the ranks of an example say; all have ended with 0, and nothing of them is left."""
    mark = secrets.token_hex(8)
    inherited = clean_environment(**{MARK: mark}, OMP_NUM_THREADS="1", **ONE_TRY)
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if start in LAUNCHERS:
        runs = [([*LAUNCHERS[start], f"--nproc-per-node={ranks}", "--max-restarts=0"], inherited)]
    else:
        runs = [([], inherited | where | {"RANK": str(rank)}) for rank in range(ranks)]
    log = folder / "output"
    with log.open("w") as file, contextlib.ExitStack() as running:
        processes = [
            running.enter_context(
                started([sys.executable, *launcher, *words], cwd=folder, env=environ, stdout=file, stderr=file)
            )
            for launcher, environ in runs
        ]
        codes = [process.wait(patient(LIMIT_S)) for process in processes]
    output = log.read_text()
    assert codes == [0] * len(runs), output
    until(lambda: not processes_of(mark, key=MARK), lambda: f"nothing is left\n{output}", LIMIT_S)
    return output


@pytest.mark.timeout(patient(2 * LIMIT_S))
@pytest.mark.parametrize("start", ["ft_launcher", *(pytest.param(way, marks=pytest.mark.slow) for way in OTHERS)])
def test_faults_change_nothing_in_the_weights(start: str, tmp_path: Path) -> None:
    words = [str(EXAMPLES / "in_process_digits.py"), "--epochs=2", "--soft-timeout=3"]
    output = outputs(start, 2, words, tmp_path)
    assert output.count("the weights are the same, bit for bit") == 2, output
    assert "ValueError: a bad sample, on purpose" in output
    assert "(soft_timeout)" in output


@pytest.mark.timeout(patient(2 * LIMIT_S))
def test_a_spare_host_takes_over(tmp_path: Path) -> None:
    output = outputs("ft_launcher", 6, [str(EXAMPLES / "in_process_spares.py")], tmp_path)
    assert output.count("ends with the result of a run without a fault") == 4, output
    assert "rank 0 leaves, too: " in output
    for entry, rank in {2: 2, 3: 3, 4: 0, 5: 1}.items():
        assert f"rank {entry} is rank {rank} of 4 from step 10 on" in output
