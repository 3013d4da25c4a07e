"""Training that `test_distributed.py` runs in several processes; rank 0 writes what came of it to OUT/result.pt.

torchrun --nproc_per_node 2 tests/distributed_training.py {ddp,fsdp} OUT
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch
from test_sft_trainer import ONE_STEP, PROMPT, make_trainer, train
from torch.distributed.fsdp import fully_shard

# Rows of unequal length and number of targets: a mean of means would show.
OPTIONS = {
    **ONE_STEP,
    "data": [*PROMPT, *PROMPT[::-1]][:8],
    "max_steps": 2,
    "learning_rate": 0.1,
    "mars_block_size": 3,
    "mars_block_offset": "random",
    "mars_block_curriculum": 0.5,
    "per_device_train_batch_size": 2,
}


def train_ddp(out: Path):
    """Two steps of the trainer as people run it."""
    trainer = make_trainer(out, **OPTIONS, ddp_backend="gloo")
    weights, logs = train(trainer)
    return trainer, {"weights": weights, "logs": logs}


def train_fsdp(out: Path):
    """One loss and its gradients with the model sharded; accelerate itself shards on accelerators only."""
    trainer = make_trainer(out, **OPTIONS, ddp_backend="gloo")
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    model = trainer.model.train()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world,)))
    examples = list(trainer.train_dataset)
    num_targets = (trainer.data_collator(examples)["labels"][:, 1:] != -100).sum()
    loss = trainer.compute_loss(model, trainer.data_collator(examples[rank::world]), num_items_in_batch=num_targets)
    loss.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return trainer, {"loss": trainer.accelerator.gather(loss.detach()[None]).mean(), "gradients": gradients}


def main() -> None:
    # Processes that wait for each other for ever say where, and fail, before the test loses patience.
    faulthandler.dump_traceback_later(150, exit=True)
    out = Path(sys.argv[2])
    trainer, result = {"ddp": train_ddp, "fsdp": train_fsdp}[sys.argv[1]](out)
    if trainer.accelerator.is_main_process:
        torch.save({**result, "world": trainer.accelerator.num_processes}, out / "result.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    # What is to be tested is over. Taking the process group down was seen to hang, once in many runs.
    os._exit(0)


if __name__ == "__main__":
    main()
