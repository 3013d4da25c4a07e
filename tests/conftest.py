"""Fixtures that several test files share: a byte-level tokenizer, and small random models."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each spin on every core, and the recipes that they start, would only choke each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

# With torch 2.6, the oldest allowed, sharding on CPU and compiled training fail in torch itself; no release between
# that one and 2.13 was tried.
needs_recent_torch = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 13), reason="fails in torch 2.6; not tried between that and 2.13"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# Warnings of our dependencies about themselves; every other warning is an error.
THIRD_PARTY_WARNINGS = (
    # TRL 1.16 and PEFT 0.21 use the names that transformers 5.24 renamed.
    r"ignore:`(is_)?gradient_checkpointing(_kwargs)?` is deprecated and will be removed in v6:FutureWarning",
    # TRL, of `compute_metrics`.
    r"ignore:`return_outputs=True`, and the logits it passes to `compute_metrics`:FutureWarning",
    # PEFT, when it saves an adapter of a model whose embedding has grown.
    r"ignore:Setting `save_embedding_layers` to `True` as the embedding layer has been resized:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def make_tokenizer(pad_token: str | None = "<|pad|>") -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, a chat template, and no mask token; `pad_token` may be `<|end|>`."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad_token)
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


SMALL = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Far from the usual 0.02: attention that is nearly uniform would hide who sees whom.
    "initializer_range": 0.4,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)),
    "qwen2-mixed": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
        )
    ),
}


def make_model(name: str = "llama", attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode, the same for the same seed."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    model.set_attn_implementation(attention)
    return model


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model()
