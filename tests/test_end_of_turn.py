"""The end of a turn is among the tokens that end generation when, and only when, training ends turns with it."""

from __future__ import annotations

import pytest
from conftest import CHAT_TEMPLATE, make_model, make_tokenizer
from datasets import Dataset
from test_sft_trainer import CHAT, CHAT_PROMPT, TEXT, config, make_trainer
from transformers import GenerationConfig

from mars_hf import MarsSFTTrainer
from mars_hf.end_of_turn import find_end_of_turn


def other_tokenizer(template: str | None = None):
    """Turns end with a token of their own, which is not the tokenizer's end."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template or CHAT_TEMPLATE.replace("<|end|>", "<|turn|>")
    return tokenizer


def test_finds_the_end_of_a_turn():
    tokenizer = other_tokenizer()
    assert find_end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|turn|>")
    assert find_end_of_turn(tokenizer, CHAT_TEMPLATE) == tokenizer.eos_token_id
    newline = CHAT_TEMPLATE.replace("<|end|>", "\n<|turn|>\n")
    assert find_end_of_turn(tokenizer, newline) == tokenizer.convert_tokens_to_ids("<|turn|>")
    assert find_end_of_turn(tokenizer, CHAT_TEMPLATE.replace("<|end|>", "\n")) is None
    tokenizer.chat_template = None
    assert find_end_of_turn(tokenizer) is None
    assert find_end_of_turn(tokenizer, "{{ raise_exception('no') }}") is None


@pytest.mark.parametrize(
    ("data", "template", "options", "ends"),
    [
        (CHAT, None, {}, True),
        (CHAT, None, {"assistant_only_loss": True}, True),
        (CHAT, None, {"packing": True, "max_length": 128}, True),
        (CHAT_PROMPT, None, {}, True),
        (TEXT, None, {}, False),
        # The assistant's end is not part of what is trained.
        (
            CHAT,
            CHAT_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|turn|>"),
            {"assistant_only_loss": True},
            False,
        ),
    ],
    ids=["chat", "assistant only", "packed", "prompt", "text", "untrained end"],
)
def test_saved_checkpoint_ends_with_turns(tmp_path, data, template, options, ends):
    tokenizer = other_tokenizer(template)
    trainer = make_trainer(tmp_path, data=data, processing_class=tokenizer, mars_block_size=3, max_steps=1, **options)
    trainer.train()
    trainer.save_model(tmp_path / "out")
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    known = saved.eos_token_id if isinstance(saved.eos_token_id, list) else [saved.eos_token_id]
    assert tokenizer.eos_token_id in known
    assert (tokenizer.convert_tokens_to_ids("<|turn|>") in known) == ends
    assert (saved.mars_block_size, saved.mars_mask_token_id) == (3, tokenizer.mask_token_id)


def test_streams_are_looked_at_as_well(tmp_path):
    tokenizer = other_tokenizer()
    stream = Dataset.from_list(CHAT).to_iterable_dataset()
    args = config(tmp_path, mars_block_size=3, max_steps=1)
    trainer = MarsSFTTrainer(make_model(), args, train_dataset=stream, processing_class=tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|turn|>") in trainer.model.generation_config.eos_token_id
