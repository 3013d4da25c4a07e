"""Tiny models of real classes for the decoding tests, and the MARS loop written out from its definition."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import make_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mars_hf import get_mars_model

VOCAB, MASK, EOS, PAD = 61, 60, 2, 0
SHAPE = {
    # With a tied head, a random model's likeliest token behind a [MASK] is [MASK].
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 6},
    "gpt_neox": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    # Compares the name of its attention with "sdpa", where others look it up.
    "falcon": {},
    "gpt2": {"tie_word_embeddings": False, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """A model with MARS generation; its random weights are large enough to be sure of some tokens, not of others."""
    shape = {} if family == "gpt2" else SHAPE
    shape = {key: value for key, value in shape.items() if family != "falcon" or key != "head_dim"}
    special = {key: SHAPE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = CONFIG_MAPPING[family](**{**special, **shape, **FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 1.0 if "embed" in name or "wte" in name else 0.25
                parameter.normal_(std=scale)
        model.get_output_embeddings().weight.normal_(std=0.5)
    return get_mars_model(model.to(dtype), mask_token_id=MASK, block_size=4)


def random_prompts(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, MASK, (length,), generator=generator) for length in lengths]


def left_pad(prompts: list[torch.Tensor], extra: int = 0, pad: int = PAD) -> dict[str, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts) + extra
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def brute_force(model, prompt, tau, window=4, max_new=20, eos=(EOS,), measure="probability", mask=MASK):
    """MARS decoding of one prompt, from the definition: no cache, no batch, one plain causal forward a step.

    Returns the new tokens and the tokens accepted by each forward.
    """
    text, accepted = prompt.tolist(), []
    while len(text) - len(prompt) < max_new:
        logits = model(torch.tensor([text + [mask] * (window - 1)])).logits[0, len(text) - 1 :].float()
        count = 0
        for k in range(window):
            probs = logits[k].softmax(-1)
            token = logits[k].index_fill(0, torch.tensor(mask), -torch.inf).argmax().item()
            if measure == "probability":
                sure = probs[token] >= tau
            elif measure == "margin":
                others = probs.clone()
                others[token] = 0
                sure = probs[token] - others.max() >= tau
            else:
                sure = -(probs * probs.log()).nansum() <= tau
            if k > 0 and not sure:
                break
            text.append(token)
            count += 1
            if token in eos or len(text) - len(prompt) == max_new:
                break
        accepted.append(count)
        if text[-1] in eos:
            break
    return text[len(prompt) :], accepted


def save_checkpoint(folder: Path) -> Path:
    """A tiny model that knows its [MASK], with a tokenizer, as a folder."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    model = tiny_model(
        vocab_size=272, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    model.generation_config.mars_mask_token_id = tokenizer.mask_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
