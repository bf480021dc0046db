"""A training with the real Trainer of `transformers`, and its state in memory: `transformers_memory.py FOLDER`.

FOLDER/training.json has: `kills` (cycle -> step and ranks), `disk` (steps between checkpoints on disk; 0: none) and
`steps`. Each rank writes its weights to FOLDER/end-RANK.json. The model is made from a configuration: nothing is
downloaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ft_client.integrations.transformers import MemoryCheckpoint

WORDS = 32


class Killed(TrainerCallback):
    """Kills this process where the plan says so, and notes each step."""

    def __init__(self, kills: dict[str, Any], seen: Path) -> None:
        self.cycle = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.rank = int(os.environ.get("RANK", "0"))
        self.kill, self.seen = kills.get(self.cycle), seen

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with self.seen.open("a") as seen:
            seen.write(f"{self.cycle} {self.rank} {state.global_step}\n")
        if self.kill and state.global_step >= self.kill["step"] and self.rank in self.kill["ranks"]:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    plan = json.loads((folder / "training.json").read_text())
    torch.manual_seed(1)
    words = torch.randint(WORDS, (60, 6))
    data = [{"input_ids": row, "labels": row[0] % 2} for row in words]
    arguments = TrainingArguments(
        output_dir=str(folder / "disk"),
        max_steps=plan["steps"],
        per_device_train_batch_size=4,
        save_strategy="steps" if plan["disk"] else "no",
        save_steps=plan["disk"] or 500,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    config = BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
    trainer.add_callback(MemoryCheckpoint(trainer))
    trainer.add_callback(Killed(plan["kills"], folder / "seen"))
    disk = folder / "disk"
    on_disk = get_last_checkpoint(str(disk)) if disk.is_dir() else None
    trainer.train(resume_from_checkpoint=MemoryCheckpoint.latest(disk) or on_disk)
    end = {"weights": [value.tolist() for value in trainer.model.parameters()], "step": trainer.state.global_step}
    (folder / f"end-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
