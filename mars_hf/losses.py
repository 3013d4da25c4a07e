"""From the log-probabilities of a two-stream sequence to the MARS loss and what training logs.

Shapes: N rows of a batch, T tokens of a two-stream sequence (clean and masked), B the MARS block size.
S is the set of supervised targets; every one of them is scored once in the clean and once in the masked stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import CLEAN, MASKED, Layout

# The confidence at which training estimates what decoding will give.
RUN_THRESHOLD = 0.95


class TokenScores(NamedTuple):
    """What the model says of the token each position predicts; all (N, T), zero where a position predicts none.

    Attributes:
        log_probs: log-probability of the predicted token.
        entropy: entropy of the distribution.
        is_top1: whether the predicted token is the most likely one.
        has_target: whether the position predicts a supervised target.
    """

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    has_target: Tensor


def mars_loss(
    log_probs: Tensor,
    stream: Tensor,
    num_targets: Tensor | int,
    mask_weight: float = 1.0,
    ar_weight: float = 1.0,
    loss_type: str = "nll",
) -> Tensor:
    """The loss of MARS: a weighted sum of -log p over both streams, divided by the number of targets.

    Args:
        log_probs: (N, T), zero where a position predicts no target.
        stream: (N, T), `masks.CLEAN` or `masks.MASKED` where a position predicts a target.
        num_targets: |S| of the whole accumulated batch; a target scored in both streams counts once.
        mask_weight: weight of the masked stream.
        ar_weight: weight of the clean stream.
        loss_type: `"nll"`, or `"dft"` to weigh each token's loss with its own detached probability.

    Returns:
        A scalar; a differentiable zero for a batch without a target.
    """
    token_losses = -log_probs
    if loss_type == "dft":
        token_losses = token_losses * log_probs.detach().exp()
    weights = torch.where(stream == MASKED, mask_weight, ar_weight)
    return (token_losses * weights).sum() / torch.as_tensor(num_targets, device=log_probs.device).clamp(min=1)


def count_within_block(flag: Tensor, layout: Layout) -> Tensor:
    """Count the flagged tokens of each token's block in its stream, up to and including the token: int64 (N, T).

    The tokens of a block in one stream must stand next to each other.
    """
    changed = (layout.block.diff(dim=1) != 0) | (layout.stream.diff(dim=1) != 0)
    is_start = torch.nn.functional.pad(changed, (1, 0), value=True)
    count = flag.long().cumsum(1)
    before_block = torch.where(is_start, count - flag.long(), 0).cummax(1).values
    return count - before_block


def accepted_runs(scores: TokenScores, layout: Layout, predicts_own_block: Tensor) -> tuple[Tensor, Tensor]:
    """Count the accepted tokens that decoding would get beyond the first of each block, with the true tokens before.

    Of a block's targets, from its second token on, those before the first that is not the model's top choice with
    probability >= `RUN_THRESHOLD` are accepted.

    Args:
        predicts_own_block: bool (N, T), whether a position predicts a token of its own block. The first token of a
            block is predicted from the block before and is no part of the run.

    Returns:
        The number of accepted tokens and the number of blocks with a target to accept; scalars.
    """
    candidate = scores.has_target & (layout.stream == MASKED) & predicts_own_block
    confident = scores.is_top1.bool() & (scores.log_probs >= math.log(RUN_THRESHOLD))
    accepted = candidate & (count_within_block(candidate & ~confident, layout) == 0)
    first = candidate & (count_within_block(candidate, layout) == 1)
    return accepted.sum(), first.sum()


def stream_sums(
    scores: TokenScores, layout: Layout, is_mask: Tensor, predicts_own_block: Tensor, block_size: int
) -> dict[str, Tensor]:
    """Sums over a batch from which `stream_metrics` makes means; sums of several processes add up.

    Args:
        scores: of every position, detached.
        layout: of every position, fields (N, T).
        is_mask: bool (N, T), where the masked stream holds a [MASK].
        predicts_own_block: bool (N, T), whether a position predicts a token of its own block.
        block_size: B.

    Returns:
        float32 scalars, under the same keys for every batch.
    """
    clean, masked = layout.stream == CLEAN, layout.stream == MASKED
    nll, top1 = -scores.log_probs, scores.is_top1.bool()
    run, run_blocks = accepted_runs(scores, layout, predicts_own_block)
    sums = {
        "tokens": clean.sum(),
        "targets": (scores.has_target & clean).sum(),
        "entropy": (scores.entropy * clean).sum(),
        "correct": (top1 & scores.has_target & clean).sum(),
        "ar_nll": (nll * clean).sum(),
        "mask_nll": (nll * masked).sum(),
        "mask_correct": (top1 & scores.has_target & masked).sum(),
        "run": run,
        "run_blocks": run_blocks,
    }
    depth = count_within_block(is_mask & masked, layout)
    at_depth = (scores.has_target & masked)[..., None] & (
        depth[..., None] == torch.arange(1, block_size + 1, device=depth.device)
    )
    for k, targets, correct in zip(
        range(1, block_size + 1), at_depth.sum((0, 1)), (at_depth & top1[..., None]).sum((0, 1)), strict=True
    ):
        sums[f"targets/depth_{k}"], sums[f"correct/depth_{k}"] = targets, correct
    return {name: value.float() for name, value in sums.items()}


def stream_metrics(sums: Mapping[str, float], block_size: int) -> dict[str, float]:
    """The metrics that training logs, from `stream_sums` as numbers. A mean of or over nothing is left out."""
    pairs = {
        "ar_loss": ("ar_nll", "targets"),
        "mask_loss": ("mask_nll", "targets"),
        "mask_accuracy": ("mask_correct", "targets"),
        **{f"mask_accuracy/depth_{k}": (f"correct/depth_{k}", f"targets/depth_{k}") for k in range(1, block_size + 1)},
    }
    metrics = {
        name: sums[part] / sums[whole]
        for name, (part, whole) in pairs.items()
        if part in sums and sums.get(whole, 0) > 0
    }
    if sums.get("run_blocks", 0) > 0:
        metrics[f"tokens_per_forward@{RUN_THRESHOLD}"] = 1 + sums["run"] / sums["run_blocks"]
    return metrics
