"""Two processes give what one process gives with accumulation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import needs_recent_torch
from distributed_training import OPTIONS
from test_losses import assert_same_gradients, gradients
from test_sft_trainer import assert_same_weights, make_trainer, train


def in_two_processes(kind: str, out: Path):
    script = Path(__file__).with_name("distributed_training.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*launcher, str(script), kind, str(out)], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    result = torch.load(out / "result.pt")
    assert result["world"] == 2
    return result


def test_data_parallel_equals_accumulation(tmp_path):
    result = in_two_processes("ddp", tmp_path)
    weights, logs = train(make_trainer(tmp_path, **OPTIONS, gradient_accumulation_steps=2))
    assert len(logs) == len(result["logs"]) == 2
    for log, expected in zip(result["logs"], logs, strict=True):
        for name in ("loss", "num_tokens", "grad_norm"):
            assert log[name] == pytest.approx(expected[name], rel=1e-5), name
    assert_same_weights(result["weights"], weights, 2e-6)


@needs_recent_torch
def test_fully_sharded_equals_one_process(tmp_path):
    result = in_two_processes("fsdp", tmp_path)
    trainer = make_trainer(tmp_path, **OPTIONS)
    model = trainer.model.train()
    loss = trainer.compute_loss(model, trainer.data_collator(list(trainer.train_dataset)))
    assert result["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(result["gradients"], gradients(model, loss))
