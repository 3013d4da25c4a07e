"""TRL's fused LM head on the scored positions only: what no target follows is never multiplied with the vocabulary.

Shapes: N rows of a batch, T tokens of a two-stream sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput


def make_head_readable(head: Any) -> None:
    """Let the fused head read a head that PEFT has wrapped.

    PEFT wraps a head that is tied to an embedding with trainable rows, and shows its `weight` only; the fused head
    reads `bias` too. Such a head has none: it is the embedding.
    """
    if not hasattr(head, "bias"):
        head.bias = None


def score_targets(
    model: nn.Module, base_model: Any, target_ids: Tensor, inputs: dict[str, Any]
) -> FusedCausalLMOutput:
    """One forward of `model`, scoring the positions that have a target.

    The fused head picks these positions itself on some devices only, and scores all of them elsewhere.

    Args:
        model: the model as the trainer wraps it.
        base_model: the causal language model inside, to which `add_fused_lm_head` was applied.
        target_ids: (N, T), the token each position predicts, -100 where none.
        inputs: what the model's forward takes, without labels.

    Returns:
        What the fused head returns, its fields (N, T) and zero where there is no target.
    """
    scored = target_ids != -100
    # One position at least: the output of a batch without any target must still be connected to the parameters.
    kept = scored.clone()
    kept[0, 0] = True

    def keep_scored(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden[kept.to(hidden.device)][None]
        return output

    hook = base_model.base_model.register_forward_hook(keep_scored)
    try:
        outputs = model(**inputs, shift_labels=target_ids[kept][None], fused_lm_head=True)
    finally:
        hook.remove()
    device = outputs.log_probs.device
    kept = kept.to(device)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(kept.shape, dtype=values.dtype, device=device).masked_scatter(kept, values)

    return FusedCausalLMOutput(
        log_probs=spread(outputs.log_probs),
        entropy=spread(outputs.entropy),
        is_top1=spread(outputs.is_top1),
        label_mask=scored.to(device),
    )
