"""Give a tokenizer and a model their [MASK]: a token with a row in the embedding."""

from __future__ import annotations

from typing import NamedTuple

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MASK_TOKEN = "<|mask|>"


class MaskToken(NamedTuple):
    """A mask token's text and the id that it has, or will have once it is added."""

    text: str
    id: int


def find_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token: str | None = None) -> MaskToken:
    """Decide on the mask token without changing the tokenizer.

    Args:
        mask_token: the token to use. None takes the tokenizer's own mask token, or `<|mask|>` if it has none.

    Raises:
        ValueError: if the token already means the end, the start, padding or an unknown token.
    """
    text = mask_token or tokenizer.mask_token or DEFAULT_MASK_TOKEN
    for role in ("eos_token", "bos_token", "pad_token", "unk_token"):
        if getattr(tokenizer, role) == text:
            raise ValueError(
                f"The mask token {text!r} is the tokenizer's `{role}`. For MARS a mask token is a slot to be filled, "
                "so it can have no other meaning. Set another mask token (`mars_mask_token` in training), or leave it "
                "unset to add one."
            )
    return MaskToken(text, tokenizer.get_vocab().get(text, len(tokenizer)))


def add_mask_token(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, mask_token: str | None = None) -> int:
    """Find or make the mask token and its embedding row.

    The tokenizer's `mask_token` is set, so it is saved with the tokenizer. The embedding grows only if the id has no
    row yet: many models have spare rows, and shrinking them would break their checkpoints.

    Args:
        tokenizer: is given the token if it lacks it.
        model: is given a row if it lacks it, in the input embedding and in the head, tied or not.
        mask_token: the token to use. None takes the tokenizer's own mask token, or `<|mask|>` if it has none.

    Returns:
        The id of the mask token.

    Raises:
        ValueError: if the token already has another meaning, or if a PEFT model would have to grow.
    """
    token = find_mask_token(tokenizer, mask_token)
    num_rows = model.get_input_embeddings().weight.shape[0]
    if token.id >= num_rows and is_peft_model(model):
        raise ValueError(
            f"The mask token {token.text!r} has id {token.id}, the embedding has {num_rows} rows, and the embedding "
            "of a `PeftModel` cannot grow. Call `add_mask_token(tokenizer, model)` on the base model before you wrap "
            "it."
        )
    tokenizer.add_special_tokens({"mask_token": token.text})
    mask_token_id = tokenizer.mask_token_id
    if mask_token_id >= num_rows:
        model.resize_token_embeddings(mask_token_id + 1, pad_to_multiple_of=64)
    return mask_token_id
