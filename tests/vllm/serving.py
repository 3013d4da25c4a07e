"""What the tests of the plug-in share: the checkpoint of `make_reference.py`, and engines that serve it."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CHECKPOINT = os.environ.get("MARS_VLLM_CHECKPOINT")
THRESHOLDS = ("0.5", "0.8", "0.95")
NEW_TOKENS, BLOCK_SIZE = 48, 4

# vLLM and its dependencies warn of themselves; the engine is not ours to keep quiet.
needs_vllm = [
    pytest.mark.skipif(CHECKPOINT is None, reason="runs in vLLM's environment: .ci/vllm"),
    pytest.mark.filterwarnings("default"),
]


@cache
def reference() -> dict[str, Any]:
    """mask, stop, and cases: question, prompt, and wanted: threshold to (tokens, forwards), "1.0" autoregressive."""
    assert CHECKPOINT is not None
    return json.loads((Path(CHECKPOINT) / "reference.json").read_text())


def wanted(setting: str) -> list[list[int]]:
    """The tokens of all cases; "lossless" is autoregressive decoding."""
    return [case["wanted"]["1.0" if setting == "lossless" else setting][0] for case in reference()["cases"]]


def prompts() -> list[list[int]]:
    return [case["prompt"] for case in reference()["cases"]]


def extra(setting: str) -> dict[str, Any]:
    """The `extra_args` of a request."""
    return {} if setting == "lossless" else {"mars_threshold": float(setting)}


@cache
def stock_model() -> Any:
    """The checkpoint in plain transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHECKPOINT).float().eval()


def start_engine(**overrides: Any) -> Any:
    """An engine in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1"
    )
    from vllm import LLM

    from mars_hf.vllm.settings import PROPOSER, WORKER

    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 2 * (BLOCK_SIZE - 1)}
    options = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "block_size": 32,
        "generation_config": "vllm",
        "worker_cls": WORKER,
        "speculative_config": speculative,
        "distributed_executor_backend": "uni",
        **overrides,
    }
    return LLM(CHECKPOINT, **options)


def generate(engine: Any, texts: list[list[int]], settings: str | list[str], **params: Any) -> list[Any]:
    """Completions of prompts at one setting, or at one for each."""
    from vllm import SamplingParams

    settings = [settings] * len(texts) if isinstance(settings, str) else settings
    options = {"temperature": 0, "max_tokens": NEW_TOKENS, **params}
    each = [SamplingParams(extra_args=extra(setting), **options) for setting in settings]
    outputs = engine.generate([{"prompt_token_ids": text} for text in texts], each, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def tokens(completions: list[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]
