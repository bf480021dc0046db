"""What each preset reads in the lines of its logger: single lines by their form, and recorded trainings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ft_launcher.tools.training_log.presets import HAVE_BARS, LogLine, preset_of, reader
from ft_launcher.tools.training_log.rank_log import Lines
from rank_monitor.contract.settings.log_pattern import PRESETS
from rank_monitor.contract.wire.messages import NO_ITERATION

RECORDED = Path(__file__).parents[3] / "data" / "training_logs"

# As Megatron-LM (core 0.12) prints them: `training_log` in megatron/training/training.py.
MEGATRON = (
    " [2026-03-01 10:00:00] iteration      100/    1000 | consumed samples:         1600 | elapsed time per iteration "
    "(ms): 253.4 | throughput per GPU (TFLOP/s/GPU): 20.1 | learning rate: 1.500000E-04 | global batch size:    16 | "
    "lm loss: 7.125000E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)
MEGATRON_NAN = MEGATRON.replace(" lm loss: 7.125000E+00 |", "").replace("nan iterations:   0", "nan iterations:   1")
# torchtitan 0.2: `MetricsProcessor.log`, in colours where it writes to a terminal.
TORCHTITAN = (
    "[rank0]:[titan] 2026-03-01 10:00:00,123 - root - INFO - step: 10  loss:  7.1250  grad_norm:  1.2000  memory: "
    "20.31GiB(25.66%)  tps: 1,234  tflops: 10.11  mfu: 3.24%"
)
TORCHTITAN_VALIDATION = (
    "[titan] 2026-03-01 10:00:00,123 - root - INFO - validate step: 10  loss:  7.0312  memory: 20.31GiB(25.66%)  "
    "tps: 9,876"
)
TQDM = "  3%|▎         | 3/100 [00:01<00:32,  2.98it/s, loss=0.5]"


def line(preset: str, *lines: str) -> LogLine | None:
    read = reader(preset)
    found = None
    for text in lines:
        found = read(text)
    return found


@pytest.mark.parametrize(
    ("preset", "text", "expected"),
    [
        ("megatron", MEGATRON, LogLine(100, step_s=0.2534, loss=7.125)),
        ("megatron", MEGATRON.replace(" 100/", "1000/"), LogLine(1000, step_s=0.2534, loss=7.125, is_complete=True)),
        ("megatron", "Evaluating iter 3/100", LogLine()),
        ("megatron", "validation loss at iteration 1000 | lm loss value: nan | lm loss PPL: nan |", LogLine()),
        ("megatron", "iteration 7 is saved to checkpoints/iter_7", None),
        ("torchtitan", TORCHTITAN, LogLine(10, loss=7.125)),
        ("torchtitan", "[titan] 2026-03-01 10:00:00,123 - root - INFO - Training completed", LogLine(is_complete=True)),
        ("torchtitan", TORCHTITAN_VALIDATION, LogLine()),
        ("torchtitan", TORCHTITAN_VALIDATION.replace("7.0312", "nan"), LogLine()),
        ("torchtitan", "[titan] ... - INFO - Training starts at step 11.", None),
        ("nanogpt", "iter 100: loss 3.2500, time 120.00ms, mfu 3.10%", LogLine(100, step_s=0.12, loss=3.25)),
        ("nanogpt", "step 250: train loss 2.5000, val loss 2.6000", LogLine()),
        ("nanogpt", "iter 100: loss", None),
        ("tqdm", TQDM, LogLine(step_s=1 / 2.98, loss=0.5)),
        ("tqdm", "100%|##########| 4/4 [00:08<00:00,  2.00s/it]", LogLine(step_s=2.0, is_complete=True)),
        ("tqdm", "train: 57it [00:03, 19.10it/s]", LogLine(step_s=1 / 19.1)),
        ("tqdm", "  3%|▎         | 3/100 [00:01<00:32,  2.98", None),
        ("tqdm", "loss 0.5 [3/100]", None),
        ("lightning", "Epoch 2:  50%|#####     | 4/8 [00:01<00:01,  4.00it/s, v_num=0, train_loss=0.25]",
         LogLine(20, step_s=0.25, loss=0.25)),
        ("lightning", "Epoch 2: 100%|##########| 8/8 [00:02<00:00,  4.00it/s]",
         LogLine(24, step_s=0.25, is_complete=True)),
        ("lightning", f"Epoch {'9' * 19}: 100%|##########| 8/8 [00:02<00:00]", LogLine(is_complete=True)),
        ("lightning", f"Epoch {'9' * 18}: 100%|##########| 8/8 [00:02<00:00]", LogLine(is_complete=True)),
        ("lightning", "Validation DataLoader 0:  50%|#####     | 1/2 [00:00<00:00,  8.08it/s]", LogLine()),
        ("lightning", "`Trainer.fit` stopped: `max_epochs=2` reached.", LogLine(is_complete=True)),
        ("huggingface", "{'loss': 2.5, 'grad_norm': 1.0, 'learning_rate': 5e-05, 'epoch': 0.5}", LogLine(loss=2.5)),
        ("huggingface", "{'loss': '2.5', 'grad_norm': '1.0', 'epoch': '0.5'}", LogLine(loss=2.5)),
        ("huggingface", "{'eval_loss': 2.5, 'epoch': 1.0}", LogLine()),
        ("huggingface", "{'train_runtime': 3.4, 'epoch': 2.0}", LogLine(is_complete=True)),
        ("huggingface", " 50%|#####     | 50/100 [00:10<00:10,  5.00it/s]", LogLine(50, step_s=0.2)),
        ("huggingface", "  0%|          | 0/100 [00:00<?, ?it/s]", LogLine()),
        ("huggingface", "Map:  50%|#####     | 500/1000 [00:10<00:10, 50.00 examples/s]", LogLine()),
        (r"it=(?P<iteration>\d+).*dt=(?P<step_time>\S+)s.*loss=(?P<loss>\S+)", "it=7 | dt=0.5s | loss=1e-3",
         LogLine(7, step_s=0.5, loss=0.001)),
        (r"it=(?P<iteration>\d+)", "epoch=7", None),
        (r"loss (?P<loss>\S+)", "loss 0.5", LogLine(steps=1, loss=0.5)),
        (r"it=(?P<iteration>\w+) (?P<loss>\w+)", "it=many none", LogLine()),
        (r"it=(?P<iteration>\d+)", "it=" + "9" * 40, LogLine()),
        (r"it=(?P<iteration>\d+)(?: took (?P<step_time>\S+))?", "it=3", LogLine(3)),
    ],
)  # fmt: skip
def test_one_line(preset: str, text: str, expected: LogLine | None) -> None:
    assert line(preset, text) == expected


@pytest.mark.parametrize(
    ("preset", "text", "loss"),
    [
        ("megatron", MEGATRON_NAN, "nan"),
        ("torchtitan", TORCHTITAN.replace("7.1250", "nan"), "nan"),
        ("nanogpt", "iter 100: loss nan, time 120.00ms, mfu 3.10%", "nan"),
        ("tqdm", TQDM.replace("0.5", "inf"), "inf"),
        ("lightning", "Epoch 0:  12%|#         | 1/8 [00:00<00:00, 15.07it/s, train_loss=nan.0]", "None"),
        ("lightning", "Epoch 0:  12%|#         | 1/8 [00:00<00:00, 15.07it/s, train_loss_step=nan, v=1]", "nan"),
        ("huggingface", "{'loss': nan, 'grad_norm': nan, 'epoch': 0.5}", "nan"),
        ("huggingface", "{'loss': 'nan', 'grad_norm': 'nan', 'epoch': '0.5'}", "nan"),
        (r"loss (?P<loss>\S+)", "loss -Infinity", "-inf"),
    ],
)
def test_a_loss_that_is_no_number(preset: str, text: str, loss: str) -> None:
    found = line(preset, text)
    assert found is not None and str(found.loss) == loss


def test_steps_of_a_bar_are_counted_within_it() -> None:
    """Each epoch has a new bar, which begins with 0."""
    bar = "Epoch:  3%|▎         | {}/100 [00:01<00:32,  2.98it/s]"
    read = reader("tqdm")
    found = [read(bar.format(done)) for done in (0, 3, 3, 100, 0, 2)]
    assert [0 if log is None else log.steps for log in found] == [0, 3, 0, 97, 0, 2]
    assert {log.iteration for log in found if log is not None} == {NO_ITERATION}


def test_the_bar_of_an_evaluation_is_not_that_of_the_training() -> None:
    """It has fewer steps, or begins anew with each evaluation; also where an evaluation comes first."""
    bar = " 50%|#####     | {}/{} [00:10<00:10,  5.00it/s]"
    read = reader("huggingface")
    shown = [(5, 9), (9, 9), (1, 20), (2, 20), (4, 9), (3, 20), (30, 40), (4, 20), (1, 40), (5, 20)]
    found = [log.iteration for log in map(read, (bar.format(*place) for place in shown)) if log is not None]
    assert found == [5, 9, 1, 2, NO_ITERATION, 3, 30, NO_ITERATION, NO_ITERATION, 5]


@pytest.mark.parametrize(
    ("preset", "files", "iterations", "losses"),
    [
        ("huggingface", ["huggingface-5.23.stderr", "huggingface-5.23.stdout"],
         [1, 3, 5, 7, 9, 10, 11, 13, 15, 17, 19, 20], 4),
        ("lightning", ["lightning-2.6.stdout"], [*range(1, 17)], 18),
        ("nanogpt", ["nanogpt.stdout"], [*range(21)], 18),
    ],
)  # fmt: skip
def test_recorded(preset: str, files: list[str], iterations: list[int], losses: int) -> None:
    """Two epochs with an evaluation after each, of 20 and of 16 steps; 21 steps with evaluations and checkpoints."""
    read = reader(preset)
    found = []
    for file in files:
        lines = Lines()
        # In pieces, as a launcher reads them.
        content = (RECORDED / file).read_bytes()
        for at in range(0, len(content), 100):
            for text in lines.split(content[at : at + 100]):
                log = read(text)
                if log is not None:
                    found.append(log)
        if preset in HAVE_BARS and lines.open_line:
            last = read(lines.open_line)
            assert last is not None
            found.append(last)
    seen = [log.iteration for log in found if log.iteration != NO_ITERATION]
    assert list(dict.fromkeys(seen)) == iterations and seen == sorted(seen)
    assert len({log.loss for log in found if log.loss is not None}) >= losses - 2
    assert all(log.loss is None or math.isfinite(log.loss) for log in found)
    assert found[-1].is_complete == (preset != "nanogpt")  # which does not print how many steps it will make


@pytest.mark.parametrize("preset", PRESETS)
def test_the_longest_lines_are_read_at_once(preset: str) -> None:
    """Lines made of the parts that a pattern looks for: none of them may take more than one pass."""
    read = reader(preset)
    for part in (
        "1",
        "[",
        "|",
        "1%|",
        "1%| 1/1 [",
        "iteration 1/",
        "step: ",
        "loss=",
        "iter 1: loss ",
        "1it [",
        "{'loss': ",
    ):
        text = (part * 4096)[:4096]
        read(text)
        read(text + "]")


MEGATRON_RUN = [
    "using world size: 8, data-parallel size: 8",
    "[after dataloaders are built] datetime: 2026-03-01 10:00:00",
    MEGATRON,
    "saving checkpoint at iteration     100 to checkpoints in torch_dist format",
    "(min, max) time across ranks (ms):",
    "    evaluate .......................................: (1234.56, 1234.60)",
    "Evaluating on 160 samples",
    "Evaluating iter 1/10",
    "----------------------------------------------------------------------------------------------------",
    "validation loss at iteration 100 | lm loss value: nan | lm loss PPL: nan |",
    MEGATRON.replace(" 100/", " 101/"),
]
"""As Megatron-LM prints a training with a checkpoint and a validation (`training.py`, `checkpointing.py`)."""
TORCHTITAN_RUN = [
    "[titan] 2026-03-01 10:00:00,000 - root - INFO - Training starts at step 1",
    TORCHTITAN.replace("step: 10", "step:  1"),
    "[titan] 2026-03-01 10:00:00,000 - root - INFO - Saving the checkpoint.",
    "[titan] 2026-03-01 10:00:00,000 - root - INFO - Finished saving the checkpoint in 2.05 seconds.",
    TORCHTITAN_VALIDATION.replace("7.0312", "nan"),
    TORCHTITAN,
    TORCHTITAN_VALIDATION,
    "[titan] 2026-03-01 10:00:00,000 - root - INFO - Training completed",
]
"""As torchtitan prints one with validations (`metrics.py`, `trainer.py`)."""


@pytest.mark.parametrize(
    ("preset", "run", "iterations"), [("megatron", MEGATRON_RUN, [100, 101]), ("torchtitan", TORCHTITAN_RUN, [1, 10])]
)
def test_a_whole_run_has_the_steps_of_its_training_alone(preset: str, run: list[str], iterations: list[int]) -> None:
    read = reader(preset)
    found = [log for log in map(read, run) if log is not None]
    assert [log.iteration for log in found if log.iteration != NO_ITERATION] == iterations
    assert all(log.loss is None or math.isfinite(log.loss) for log in found)


@pytest.mark.parametrize(
    ("lines", "preset"),
    [
        (MEGATRON_RUN, "megatron"),
        (TORCHTITAN_RUN, "torchtitan"),
        (["step 250: train loss 2.5000, val loss 2.6000", "iter 1: loss 3.2500, time 120.00ms, mfu 3.10%"], "nanogpt"),
        (["Sanity Checking DataLoader 0: 100%|##| 2/2 [00:00<00:00, 9.00it/s]",
          "Epoch 2:  50%|#####     | 4/8 [00:01<00:01,  4.00it/s, v_num=0]"], "lightning"),
        ([" 50%|#####     | 50/100 [00:10<00:10,  5.00it/s]", "{'loss': 2.5, 'epoch': 0.5}"], "huggingface"),
        ([" 50%|#####     | 50/100 [00:10<00:10,  5.00it/s]"], "tqdm"),
    ],
)  # fmt: skip
def test_the_preset_of_some_lines_is_known(lines: list[str], preset: str) -> None:
    found = preset_of(lines)
    assert found is not None and found[0] == preset
    seen = reader(preset)(found[1])
    assert seen is not None


def test_other_lines_are_of_no_preset() -> None:
    assert preset_of(["epoch 1 done", "step 7 of 100, loss 0.5"]) is None
