"""Load a checkpoint with its tokenizer."""

from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
