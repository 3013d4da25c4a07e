"""TRL's fused LM head on the scored positions only: what no target follows is never multiplied with the vocabulary.

Also what `SFTTrainer` does with a loss that comes from it.

Shapes: N rows of a batch, T tokens of a two-stream sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput


def make_head_readable(head: Any) -> None:
    """Let the fused head read a head that PEFT has wrapped.

    PEFT wraps a head that is tied to an embedding with trainable rows, and shows its `weight` only; the fused head
    reads `bias` too. Such a head has none: it is the embedding.
    """
    if not hasattr(head, "bias"):
        head.bias = None


def score_targets(
    model: nn.Module, base_model: Any, target_ids: Tensor, inputs: dict[str, Any], routed: Tensor | None = None
) -> FusedCausalLMOutput:
    """One forward of `model`, scoring the positions that have a target.

    The fused head picks these positions itself on some devices only, and scores all of them elsewhere.

    Args:
        model: the model as the trainer wraps it.
        base_model: the causal language model inside, to which `add_fused_lm_head` was applied.
        target_ids: (N, T), the token each position predicts, -100 where none.
        inputs: what the model's forward takes, without labels.
        routed: (N, T), for a Mixture-of-Experts model: the tokens that its experts are to share evenly.

    Returns:
        What the fused head returns, its fields (N, T) and zero where there is no target; with `routed`, the loss of
        the router as `aux_loss`.
    """
    scored = target_ids != -100
    # One position at least: the output of a batch without any target must still be connected to the parameters.
    kept = scored.clone()
    kept[0, 0] = True
    router_logits: tuple[Tensor, ...] = ()

    def ask_router(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    @torch.compiler.disable  # how many positions are scored differs between batches
    def keep_scored(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal router_logits
        router_logits = getattr(output, "router_logits", None) or ()
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden[kept.to(hidden.device)][None]
        return output

    hooks = [base_model.base_model.register_forward_hook(keep_scored)]
    if routed is not None:
        # The fused head would read the attention mask as one of padding, so only the backbone is asked.
        inputs = {**inputs, "output_router_logits": False}
        hooks.append(base_model.base_model.register_forward_pre_hook(ask_router, with_kwargs=True))
    try:
        outputs = model(**inputs, shift_labels=target_ids[kept][None], fused_lm_head=True)
    finally:
        for hook in hooks:
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
        aux_loss=None if routed is None else _router_loss(base_model.config, router_logits, routed),
    )


def mode_of(trainer: SFTTrainer) -> str:
    """Under which name `SFTTrainer` keeps the metrics of what it does: `"train"` or `"eval"`."""
    return "train" if trainer.model.training else "eval"


def finish_loss(trainer: SFTTrainer, loss: Tensor, aux_loss: Tensor | None, num_items_in_batch: Any) -> Tensor:
    """What `SFTTrainer` makes of the loss of a batch before the backward pass; logs the router's.

    Args:
        loss: divided by `num_items_in_batch`, or where that is None by the targets of the batch.
        aux_loss: the loss of the router, None for a model without.
        num_items_in_batch: the targets of every process and all accumulated batches, or None.
    """
    # DDP averages the gradients, and that count is over all processes.
    if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
        loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())
    if aux_loss is None:
        return loss
    mean = trainer.accelerator.gather_for_metrics(aux_loss.detach()).mean().item()
    trainer._metrics[mode_of(trainer)]["aux_loss"].append(mean)
    # A mean over the micro-batch, so accumulation takes the mean of these.
    steps = trainer.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
    return loss + trainer.router_aux_loss_coef * aux_loss.to(loss.device) / steps


def _router_loss(config: PreTrainedConfig, router_logits: tuple[Tensor, ...], routed: Tensor) -> Tensor:
    """The load-balancing loss over some tokens, from (NT, experts) logits for each layer."""
    config = config.get_text_config()
    chosen = routed.flatten()
    # In float32, as under autocast inside the model's forward.
    logits = tuple(layer[chosen.to(layer.device)].float() for layer in router_logits)
    experts = getattr(config, "num_experts", None)  # some families name it as Mixtral did
    return load_balancing_loss_func(logits, experts or config.num_local_experts, config.num_experts_per_tok)
