"""What training logs of both streams: from the scores of a batch into the metrics of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from .fused_head import mode_of
from .losses import TokenScores, stream_metrics, stream_sums
from .streams import batch_layout, predicts_own_block


def log_streams(
    trainer: SFTTrainer, outputs: FusedCausalLMOutput, inputs: dict[str, Tensor], block_size: int, mask_token_id: int
) -> None:
    """Add a two-stream batch to the metrics, summed over the processes."""
    sums = stream_sums(
        TokenScores(outputs.log_probs.detach(), outputs.entropy.detach(), outputs.is_top1, outputs.label_mask),
        batch_layout(inputs),
        inputs["input_ids"] == mask_token_id,
        predicts_own_block(inputs),
        block_size,
    )
    total = _over_processes(trainer, sums)
    metrics = _metrics(trainer)
    # What `SFTTrainer` logs, of the clean stream and by its rules.
    for name, part in (("entropy", "entropy"), ("mean_token_accuracy", "correct")):
        metrics[name].append(total[part] / total["targets"] if total["targets"] > 0 else 0.0)
    if trainer.model.training:
        trainer._total_train_tokens += int(total["tokens"]) // trainer._tp_size
    metrics["num_tokens"] = [trainer._total_train_tokens]
    _add(trainer, total)


@contextmanager
def clean_stream_logged(trainer: SFTTrainer, model: nn.Module) -> Iterator[None]:
    """Within it, `SFTTrainer` computes the loss of a batch without masked stream: add that as `ar_loss` as well.

    Args:
        model: as the trainer wraps it; what it returns for the fused head is read.
    """
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield
    finally:
        hook.remove()
    scores = next((output for output in outputs if getattr(output, "log_probs", None) is not None), None)
    if scores is None:
        return
    sums = {"ar_nll": -scores.log_probs.detach().sum(), "targets": scores.label_mask.sum()}
    _add(trainer, _over_processes(trainer, sums))


def put_stream_metrics(trainer: SFTTrainer) -> None:
    """Put what was added since it was last called into the metrics that the trainer is about to log.

    A mean is over all tokens, or all blocks, however they were spread over batches; `SFTTrainer` takes the mean of its
    own over batches.
    """
    totals = _totals(trainer)
    for name, value in stream_metrics(totals, trainer.args.mars_block_size).items():
        _metrics(trainer)[name] = [value]
    totals.clear()


def _add(trainer: SFTTrainer, sums: dict[str, float]) -> None:
    totals = _totals(trainer)
    for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + value


def _totals(trainer: SFTTrainer) -> dict[str, float]:
    """The sums over what was trained on, or evaluated, since the last log."""
    return trainer._stream_totals[mode_of(trainer)]


def _over_processes(trainer: SFTTrainer, sums: dict[str, Tensor]) -> dict[str, float]:
    totals = trainer.accelerator.gather_for_metrics(torch.stack(list(sums.values()))[None]).sum(0).tolist()
    return dict(zip(sums, totals, strict=True))


def _metrics(trainer: SFTTrainer) -> dict[str, Any]:
    return trainer._metrics[mode_of(trainer)]
