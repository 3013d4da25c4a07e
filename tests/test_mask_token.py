"""The mask token and its embedding row."""

from __future__ import annotations

import pytest
import torch
from conftest import SMALL, make_tokenizer
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mars_hf.mask_token import add_mask_token, find_mask_token
from mars_hf.refusals import refuse_optimizer


def make_llama(rows: int, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": rows, "tie_word_embeddings": tied}))


def rows_of(model) -> tuple[int, int]:
    return model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0]


@pytest.mark.parametrize("tied", [False, True])
def test_adds_a_token_and_rows_where_there_are_none(tokenizer, tied):
    model = make_llama(len(tokenizer), tied)
    old = model.get_input_embeddings().weight.detach().clone()
    mask_token_id = add_mask_token(tokenizer, model)
    assert mask_token_id == len(old) == tokenizer.mask_token_id
    assert tokenizer("a<|mask|>")["input_ids"][1:] == [mask_token_id]
    assert rows_of(model) == (320, 320)  # a multiple of 64
    assert model.config.vocab_size == 320
    assert torch.equal(model.get_input_embeddings().weight[: len(old)], old)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert model(torch.tensor([[mask_token_id]])).logits.shape[-1] == 320


def test_spare_rows_are_used_and_kept(tokenizer):
    model = make_llama(300)
    weight = model.get_input_embeddings().weight
    assert add_mask_token(tokenizer, model) == 261
    assert rows_of(model) == (300, 300)
    assert model.get_input_embeddings().weight is weight


def test_twice_is_once(tokenizer):
    model = make_llama(len(tokenizer))
    first = add_mask_token(tokenizer, model)
    size = len(tokenizer)
    assert add_mask_token(tokenizer, model) == first
    assert len(tokenizer) == size


def test_which_token_is_taken(tokenizer):
    model = make_llama(300)
    tokenizer.add_tokens(["<|mask|>", "<|own|>", "<|given|>"])
    assert find_mask_token(tokenizer) == ("<|mask|>", 261)
    tokenizer.mask_token = "<|own|>"
    assert find_mask_token(tokenizer) == ("<|own|>", 262)
    assert find_mask_token(tokenizer, "<|given|>") == ("<|given|>", 263)
    assert find_mask_token(tokenizer, "<|new|>") == ("<|new|>", 264)
    assert tokenizer.mask_token == "<|own|>"
    assert add_mask_token(tokenizer, model, "<|new|>") == 264
    assert tokenizer.mask_token == "<|new|>"


def test_is_saved_with_the_tokenizer(tokenizer, tmp_path):
    mask_token_id = add_mask_token(tokenizer, make_llama(300))
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (loaded.mask_token, loaded.mask_token_id) == ("<|mask|>", mask_token_id)
    assert loaded.decode([mask_token_id, 71], skip_special_tokens=True) == "h"


@pytest.mark.parametrize("role", ["eos_token", "bos_token", "pad_token", "unk_token"])
def test_a_token_with_another_meaning_is_refused(role):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({role: "<|x|>"})
    with pytest.raises(ValueError, match=rf"'<\|x\|>' is the tokenizer's `{role}`"):
        add_mask_token(tokenizer, make_llama(300), "<|x|>")
    assert tokenizer.mask_token is None


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_blank_token_is_refused(tokenizer, blank):
    with pytest.raises(ValueError, match="is blank, and any text has blanks"):
        add_mask_token(tokenizer, make_llama(300), blank)
    assert tokenizer.mask_token is None


def test_a_peft_model_cannot_grow(tokenizer):
    model = get_peft_model(make_llama(len(tokenizer)), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="on the base model before you wrap it"):
        add_mask_token(tokenizer, model)
    assert tokenizer.mask_token is None
    roomy = get_peft_model(make_llama(300), LoraConfig(target_modules=["q_proj"]))
    assert add_mask_token(tokenizer, roomy) == 261


def tokenizer_of(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    model = models.WordLevel(vocabulary, unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[UNK]")


@pytest.mark.parametrize("highest", [3, 9])
def test_ids_with_holes(highest):
    tokenizer = tokenizer_of({"a": 0, "b": 1, "[UNK]": 2, "c": highest})
    expected = find_mask_token(tokenizer).id
    assert add_mask_token(tokenizer, make_llama(16)) == expected == tokenizer.mask_token_id
    assert list(tokenizer.get_vocab().values()).count(expected) == 1


def test_an_id_that_another_token_has_is_refused():
    tokenizer = tokenizer_of({"a": 0, "b": 1, "[UNK]": 2, "c": 4})
    with pytest.raises(ValueError, match="would get the id 4, which 'c' has"):
        add_mask_token(tokenizer, make_llama(16))
    assert tokenizer.mask_token is None


def sharded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model as ZeRO-3 leaves it: the weight is elsewhere, and its shape is noted beside it."""
    weight = model.get_input_embeddings().weight
    weight.ds_shape = weight.shape
    weight.data = torch.empty(0)
    return model


def test_the_rows_of_a_sharded_embedding_are_counted(tokenizer, monkeypatch):
    grown = []
    monkeypatch.setattr(LlamaForCausalLM, "resize_token_embeddings", lambda self, rows, **_: grown.append(rows))
    optimizer = torch.optim.SGD(make_llama(300).parameters(), lr=0.1)
    model = sharded(make_llama(300))
    refuse_optimizer(optimizer, model, find_mask_token(tokenizer))
    assert add_mask_token(tokenizer, model) == 261
    assert grown == []
    small, other = sharded(make_llama(261)), make_tokenizer()
    with pytest.raises(ValueError, match="the embedding has 261 rows"):
        refuse_optimizer(optimizer, small, find_mask_token(other))
    add_mask_token(other, small)
    assert grown == [262]
