"""From the logits of a step to the tokens that are accepted: confidence, and how far it reaches in every row.

Shapes: N rows, B candidates of a step (the window), V vocabulary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Confidence = Literal["probability", "margin", "entropy"]
CONFIDENCES: tuple[str, ...] = get_args(Confidence)


def confidence_of(logits: Tensor, tokens: Tensor, measure: str) -> Tensor:
    """How sure the model is of its candidates, from its raw logits in float32.

    Args:
        logits: (N, B, V) raw logits, float32.
        tokens: (N, B) chosen tokens.
        measure: "probability", the softmax probability of the chosen token (the measure of the paper); "margin",
            that probability less the best other one; "entropy", of the whole distribution in nats.

    Returns:
        (N, B) float32.
    """
    if measure == "entropy":
        log_probs = logits.log_softmax(-1)
        # A banned token has probability 0 and log-probability -inf; its share of the entropy is 0, not NaN.
        return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)
    # One pass of one kernel; on CPU `logsumexp` takes four.
    probabilities = logits.softmax(-1)
    chosen = probabilities.gather(-1, tokens[..., None])[..., 0]
    if measure == "probability":
        return chosen
    return chosen - probabilities.scatter_(-1, tokens[..., None], 0.0).amax(-1)


def is_confident(confidence: Tensor, threshold: Tensor, measure: str) -> Tensor:
    """Which candidates reach the threshold: (N, B) bool from (N, B) confidences and (N, 1) thresholds.

    A threshold of 1 means plain autoregression, and a float32 probability can round to exactly 1.0, so nothing
    reaches it. Entropy counts the other way round: it must not exceed the threshold.
    """
    if measure == "entropy":
        return confidence <= threshold
    return (confidence >= threshold) & (threshold < 1.0)


def accepted_length(confident: Tensor) -> Tensor:
    """Tokens accepted in each row: candidate 0 always, then from left to right up to the first unsure one.

    Args:
        confident: (N, B) bool; the first column does not matter.

    Returns:
        (N,) int64, from 1 to B.
    """
    return 1 + confident[:, 1:].long().cumprod(-1).sum(-1)


def cut_after_first(tokens: Tensor, length: Tensor, stop_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Shorten the accepted runs so that each ends with its first stop token, if it has one.

    Args:
        tokens: (N, B) candidates.
        length: (N,) accepted lengths.
        stop_tokens: ids that end a sequence, or None.

    Returns:
        (N,) shortened lengths and (N,) bool, whether the run ends with a stop token.
    """
    if stop_tokens is None:
        return length, torch.zeros_like(length, dtype=torch.bool)
    is_stop = torch.isin(tokens, stop_tokens)
    until_stop = 1 + (is_stop.long().cumsum(-1) == 0).long().sum(-1)
    return torch.minimum(length, until_stop), until_stop <= length
