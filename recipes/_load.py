"""What a recipe reads: a checkpoint with its tokenizer, and problems."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_hf import AutoMarsModelForCausalLM, get_mars_model


def load_checkpoint(name: str, dtype: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model with MARS generation, on the GPU if there is one, and its tokenizer, which pads on the left."""
    model = AutoMarsModelForCausalLM.from_pretrained(
        name, dtype=dtype, device_map="cuda" if torch.cuda.is_available() else None
    )
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    # What PEFT's own `merge_and_unload` saves does not record its [MASK], but its tokenizer has it.
    return get_mars_model(model, mask_token_id=tokenizer.mask_token_id), tokenizer


def read_problems(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The first so many lines of a JSON lines file; all of them without a limit."""
    return [json.loads(line) for line in path.read_text().splitlines()[:limit]]
