"""The token with which a chat template ends a turn: what a model trained on such turns stops with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

# Enough rows to meet an end of turn; the last rows of a dataset look as the first.
ROWS_LOOKED_AT = 64
ANSWER = "mars"


def find_end_of_turn(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> int | None:
    """The id of the special token right behind an assistant's last message, None where a template has none.

    Args:
        chat_template: the template; None takes the tokenizer's own.
    """
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
    except (TemplateError, TypeError, ValueError):  # no template, or one that wants other messages
        return None
    rest = text.rpartition(ANSWER)[2].lstrip()
    special = sorted(tokenizer.get_added_vocab().items(), key=lambda item: -len(item[0]))
    return next((token_id for token, token_id in special if rest.startswith(token)), None)


def record_end_of_turn(
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[dict[str, Any]],
    chat_template: str | None = None,
) -> None:
    """Add the end of a turn to the tokens that end generation, if the examples train it.

    Args:
        examples: tokenized, with `labels`, or `input_ids` alone if every token is a target.
        chat_template: the template they were made with; None takes the tokenizer's own.
    """
    token_id = find_end_of_turn(tokenizer, chat_template)
    if token_id is None:
        return
    known = generation_config.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    rows = (row.get("labels", row.get("input_ids", ())) for row in islice(examples, ROWS_LOOKED_AT))
    if token_id not in known and any(token_id in row for row in rows):
        # The tokenizer's own end comes first, as `Trainer` would put it.
        own = [] if tokenizer.eos_token_id in (None, token_id, *known) else [tokenizer.eos_token_id]
        generation_config.eos_token_id = [*own, *known, token_id]
