"""Load a checkpoint with its tokenizer, and give it prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase

from mars_hf import AutoMarsModelForCausalLM, get_mars_model

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_checkpoint(name: str, dtype: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model with MARS generation, on the GPU if there is one, and its tokenizer, which pads on the left.

    `dtype` is one of `DTYPES`; auto is that of the checkpoint.
    """
    model = AutoMarsModelForCausalLM.from_pretrained(
        name, dtype=dtype, device_map="cuda" if torch.cuda.is_available() else None
    )
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    # What PEFT's own `merge_and_unload` saves does not record its [MASK], but its tokenizer has it.
    return get_mars_model(model, mask_token_id=tokenizer.mask_token_id), tokenizer


def as_batch(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], raw: bool = False) -> BatchEncoding:
    """The prompts, padded: as a user's turn, or as plain text if `raw` or where the tokenizer has no chat template."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if raw or not tokenizer.chat_template:
        return tokenizer(list(prompts), padding=True, return_tensors="pt")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
