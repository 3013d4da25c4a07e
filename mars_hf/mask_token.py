"""Give a tokenizer and a model their [MASK]: a token with a row in the embedding."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = get_logger(__name__)

DEFAULT_MASK_TOKEN = "<|mask|>"
# On a model: whether its mask token was recorded by a trainer that has not trained the model.
UNTRAINED = "_mars_mask_untrained"


class MaskToken(NamedTuple):
    """A mask token's text and the id that it has, or will have once it is added."""

    text: str
    id: int


def find_mask_token(
    tokenizer: PreTrainedTokenizerBase, mask_token: str | None = None, **roles: str | None
) -> MaskToken:
    """Decide on the mask token without changing the tokenizer.

    Args:
        mask_token: the token to use. None takes the tokenizer's own mask token, or `<|mask|>` if it has none.
        roles: special tokens that the tokenizer is going to have, such as `pad_token`; None where it keeps its own.

    Raises:
        ValueError: if the token already means the end, the start, padding or an unknown token, or is a piece of
            ordinary text or blank; if it is new and its id would be another token's.
    """
    if mask_token is not None and not str(mask_token).strip():
        raise ValueError(
            f"The mask token {mask_token!r} is blank, and any text has blanks. Set a special token (`mars_mask_token` "
            "in training), or leave it unset to add one."
        )
    text = mask_token or tokenizer.mask_token or DEFAULT_MASK_TOKEN
    for role in ("eos_token", "bos_token", "pad_token", "unk_token"):
        if text in (getattr(tokenizer, role), roles.get(role)):
            raise ValueError(
                f"The mask token {text!r} is the tokenizer's `{role}`. For MARS a mask token is a slot to be filled, "
                "so it can have no other meaning. Set another mask token (`mars_mask_token` in training), or leave it "
                "unset to add one."
            )
    vocabulary = tokenizer.get_vocab()
    known = vocabulary.get(text)
    if known is not None and text not in tokenizer.get_added_vocab():
        stands_for = tokenizer.decode([known])
        if tokenizer.encode(stands_for, add_special_tokens=False) == [known]:
            raise ValueError(
                f"The mask token {text!r} is an ordinary token: it stands for {stands_for!r} in any text, and a "
                "[MASK] could not be told from it. Set a special token (`mars_mask_token` in training), or leave it "
                "unset to add one."
            )
    if known is not None:
        return MaskToken(text, known)
    # A tokenizer numbers a new token by those that it has, even where that id is taken.
    if holder := next((token for token, number in vocabulary.items() if number == len(tokenizer)), None):
        raise ValueError(
            f"The mask token {text!r} is new and would get the id {len(tokenizer)}, which {holder!r} has: the ids of "
            "this tokenizer have holes. Set a special token that it already has (`mars_mask_token` in training)."
        )
    return MaskToken(text, len(tokenizer))


def add_mask_token(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    mask_token: str | None = None,
    pad_to_multiple_of: int | None = 64,
) -> int:
    """Find or make the mask token and its embedding row.

    The tokenizer's `mask_token` is set, so it is saved with the tokenizer. The embedding grows only if the id has no
    row yet: many models have spare rows, and shrinking them would break their checkpoints.

    Args:
        tokenizer: is given the token if it lacks it.
        model: is given a row if it lacks it, in the input embedding and in the head, tied or not.
        mask_token: the token to use. None takes the tokenizer's own mask token, or `<|mask|>` if it has none.
        pad_to_multiple_of: if the embedding grows, it grows to a multiple of it, which matrix units like. None where
            an adapter is trained afterwards: PEFT, loading one, grows the base to the tokenizer's length only.

    Returns:
        The id of the mask token.

    Raises:
        ValueError: if the token already has another meaning, or if a PEFT model would have to grow.
    """
    token = find_mask_token(tokenizer, mask_token)
    num_rows = embedding_rows(model)
    if token.id >= num_rows and is_peft_model(model):
        raise ValueError(
            f"The mask token {token.text!r} has id {token.id}, the embedding has {num_rows} rows, and the embedding "
            "of a `PeftModel` cannot grow. Call `add_mask_token(tokenizer, model)` on the base model before you wrap "
            "it."
        )
    tokenizer.add_special_tokens({"mask_token": token.text})
    mask_token_id = tokenizer.mask_token_id
    if mask_token_id >= num_rows:
        model.resize_token_embeddings(mask_token_id + 1, pad_to_multiple_of=pad_to_multiple_of)
    return mask_token_id


def embedding_rows(model: PreTrainedModel) -> int:
    """How many tokens the input embedding has rows for, also where ZeRO-3 has taken the weights of this process."""
    weight = model.get_input_embeddings().weight
    return getattr(weight, "ds_shape", weight.shape)[0]


def record_mask_token(model: PreTrainedModel, mask_token_id: int) -> None:
    """Record the mask token in a model's generation config, where decoding finds it.

    Whoever trains the model next must know whether it has learned the token, so one that was not recorded before is
    noted as untrained until `note_mask_trained`.

    Args:
        model: the model itself, not a PEFT wrapper.
    """
    generation_config: Any = model.generation_config
    if getattr(generation_config, "mars_mask_token_id", None) != mask_token_id:
        generation_config.mars_mask_token_id = mask_token_id
        setattr(model, UNTRAINED, True)


def note_mask_trained(model: PreTrainedModel) -> None:
    """Note that the weights of a model itself, and not of an adapter beside them, have learned the mask token."""
    setattr(model, UNTRAINED, False)


def _has_learned(model: PreTrainedModel, mask_token_id: int) -> bool:
    recorded = getattr(model.generation_config, "mars_mask_token_id", None)
    return recorded == mask_token_id and not getattr(model, UNTRAINED, False)


def train_mask_row(model: PreTrainedModel, peft_config: Any, mask_token: MaskToken) -> Any:
    """Have PEFT train the embedding of the mask token, which adapters on other layers leave as it is.

    A model whose generation config records this mask token has been trained with it before, and may keep it, unless
    a trainer has recorded it (`record_mask_token`) and not trained since.

    Args:
        model: the model, wrapped by PEFT or not.
        peft_config: the configuration it will be wrapped with, or None.
        mask_token: the mask token, whose id need not have a row yet.

    Returns:
        `peft_config`, or where that would leave the row untrained, a copy that trains it.

    Raises:
        ValueError: if the row would stay untrained, because the embedding is frozen, the model is wrapped already or
            the adapter trains no rows; for adapters that put virtual tokens before the text, and for activated ones.
    """
    is_wrapped = is_peft_model(model)
    base_model = model.get_base_model() if is_wrapped else model
    configs = adapter_configs(model, peft_config)
    if prompts := sorted(
        {type(config).__name__ for config in configs if getattr(config, "is_prompt_learning", False)}
    ):
        raise ValueError(
            f"`{', '.join(prompts)}` puts virtual tokens before the text, and MARS has no place for them in its two "
            "streams. Use `LoraConfig`."
        )
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        raise ValueError(
            "Activated LoRA (`alora_invocation_tokens`) counts from the last invocation in a row, which may stand in "
            "the masked stream, and would leave the clean stream to the base model. Use a plain `LoraConfig`."
        )
    if _has_learned(base_model, mask_token.id):
        return peft_config
    embedding = base_model.get_input_embeddings()
    if configs == [None]:
        if not embedding.weight.requires_grad:
            raise ValueError(
                f"The embedding is frozen, so the mask token {mask_token.text!r} (id {mask_token.id}) would stay "
                "untrained, and the model could not tell a [MASK] from noise. Call "
                "`model.get_input_embeddings().requires_grad_(True)`, or train an adapter with `peft_config`."
            )
        return peft_config
    path = next(name for name, module in base_model.named_modules() if module is embedding)
    name = path.rsplit(".", 1)[-1]
    if any(_trains_row(config, path, mask_token.id) for config in configs):
        return peft_config
    untrained = (
        f"The PEFT configuration would leave the mask token {mask_token.text!r} (id {mask_token.id}) untrained, and "
        "the model could not tell a [MASK] from noise."
    )
    if any(hasattr(config, "token_indices") for config in configs):
        raise ValueError(f"{untrained} Add {mask_token.id} to the `token_indices` of the configuration.")
    if not all(hasattr(config, "trainable_token_indices") for config in configs):
        kinds = ", ".join(sorted({type(config).__name__ for config in configs}))
        raise ValueError(
            f"{untrained} `{kinds}` cannot train single rows of the embedding. Use `LoraConfig`, or `modules_to_save="
            f"[{name!r}]` where the configuration has it."
        )
    if is_wrapped:
        raise ValueError(
            f"{untrained} The model is wrapped already. Wrap it with `trainable_token_indices="
            f"{{{name!r}: [{mask_token.id}]}}`, or pass the base model and `peft_config` to the trainer."
        )
    logger.warning(
        f"The mask token {mask_token.text!r} is new to the model, so its embedding is trained besides the adapter: "
        f"`trainable_token_indices={{{name!r}: [{mask_token.id}]}}` is added to the PEFT configuration."
    )
    return _with_trained_row(peft_config, path, name, mask_token.id)


def adapter_configs(model: Any, peft_config: Any) -> list[Any]:
    """The PEFT configurations a model is trained with: those it is wrapped with, or else the one given, or None."""
    return [model.peft_config[name] for name in model.active_adapters] if is_peft_model(model) else [peft_config]


def _with_trained_row(peft_config: Any, embedding: str, name: str, row: int) -> Any:
    """A copy of a PEFT configuration that also trains a row of the embedding with this module path and name."""
    peft_config = copy.deepcopy(peft_config)
    indices = peft_config.trainable_token_indices or {}
    if not isinstance(indices, dict):
        indices = {name: indices}  # what a list means to PEFT
    key = next((key for key in indices if is_named([key], embedding)), name)
    peft_config.trainable_token_indices = {**indices, key: [*indices.get(key, ()), row]}
    return peft_config


def is_named(names: str | Iterable[str] | None, module: str) -> bool:
    """Whether PEFT takes these names, or this pattern, for the module at this path."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _trains_row(peft_config: Any, embedding: str, row: int) -> bool:
    """Whether a PEFT configuration trains one row of the embedding at this module path."""
    if is_named(getattr(peft_config, "modules_to_save", None), embedding):
        return True
    targets, rows = getattr(peft_config, "target_modules", None), getattr(peft_config, "token_indices", None)
    # `TrainableTokensConfig` trains some rows only, of the embedding unless told otherwise; every other adapter
    # reaches all rows of what it names.
    if is_named(targets, embedding) or (rows is not None and targets is None):
        return rows is None or row in rows
    indices = getattr(peft_config, "trainable_token_indices", None) or {}
    if not isinstance(indices, dict):
        return row in indices
    return any(is_named([name], embedding) and row in rows for name, rows in indices.items())
