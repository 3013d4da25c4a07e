"""Two processes give what one process gives with accumulation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import needs_recent_torch
from distributed_training import OPTIONS
from test_losses import assert_same_gradients, gradients
from test_sft_trainer import assert_same_weights, make_trainer, train


def in_two_processes(kind: str, out: Path):
    script = Path(__file__).with_name("distributed_training.py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    logs = [out / f"log{rank}.txt" for rank in range(2)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), kind, str(out)],
                    env={**shared, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=stack.enter_context(log.open("w")),
                    stderr=subprocess.STDOUT,
                )
            )
            for rank, log in enumerate(logs)
        ]
        codes = [process.wait(timeout=200) for process in processes]
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    result = torch.load(out / "result.pt")
    assert result["world"] == 2
    return result


def test_data_parallel_equals_accumulation(tmp_path):
    result = in_two_processes("ddp", tmp_path)
    weights, logs = train(make_trainer(tmp_path, **OPTIONS, gradient_accumulation_steps=2))
    assert len(logs) == len(result["logs"]) == 2
    for log, expected in zip(result["logs"], logs, strict=True):
        for name in ("loss", "num_tokens", "grad_norm", "ar_loss", "mask_loss", "tokens_per_forward@0.95"):
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
