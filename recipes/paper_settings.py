"""What the paper's tables compare: systems, rows and the two scales, as plain tables."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THRESHOLDS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
BLOCK_SIZES = (4, 8, 16)
BATCH_SIZES = (4, 8, 16)


@dataclass(frozen=True)
class System:
    """One way to train.

    Attributes:
        label: what tables call it.
        trainer: "sft", "mars" or "block_diffusion".
        start: the system whose checkpoint it goes on from; None starts from the scale's model.
        block_size: B, for "mars" and "block_diffusion".
        ar_weight: weight of the clean stream; 0 is the paper's "without SFT loss".
        is_draft: a smaller model, which drafts for speculative decoding.
    """

    label: str
    trainer: str
    start: str | None = "ar"
    block_size: int = 0
    ar_weight: float = 1.0
    is_draft: bool = False


SYSTEMS = {
    "ar": System("AR SFT", "sft", start=None),
    # MARS sees the data twice as often, once in each stage; this one too.
    "ar-twice": System("AR SFT, twice as long", "sft"),
    "draft": System("AR SFT, small draft", "sft", start=None, is_draft=True),
    "bd-b4": System("Block Diffusion", "block_diffusion", block_size=4),
    **{f"mars-b{size}": System("MARS", "mars", block_size=size) for size in BLOCK_SIZES},
    **{
        f"mars-nosft-b{size}": System("MARS without SFT loss", "mars", block_size=size, ar_weight=0.0)
        for size in BLOCK_SIZES
    },
}


@dataclass(frozen=True)
class Decoding:
    """One way to decode.

    Attributes:
        method: "stock", "mars", "lossless", "block_diffusion", "jacobi", "prompt_lookup" or "speculative".
        threshold: of the confidence, for "mars" and "block_diffusion".
        confidence: `mars_confidence`.
        cache: `mars_cache`; "block-16" is the block cache with blocks of 16 tokens.
    """

    method: str = "stock"
    threshold: float | None = None
    confidence: str = "probability"
    cache: str = "cursor"

    @property
    def key(self) -> str:
        parts = [self.method]
        if self.threshold is not None:
            parts.append(f"{self.threshold:g}")
        parts += [part for part, usual in ((self.confidence, "probability"), (self.cache, "cursor")) if part != usual]
        return "/".join(parts)


def mars(threshold: float, confidence: str = "probability", cache: str = "cursor") -> Decoding:
    return Decoding("mars", threshold, confidence, cache)


@dataclass(frozen=True)
class Row:
    """A system and how it decodes; the records of a row are found by both."""

    system: str
    decoding: Decoding = field(default_factory=Decoding)


# Table 2 (one token per forward) and Table 4 (threshold 0.95), and the other ways to decode faster.
MAIN = [
    Row("ar"),
    Row("ar-twice"),
    *(Row("bd-b4", Decoding("block_diffusion", threshold)) for threshold in (1.0, 0.95)),
    *(Row("mars-nosft-b4", mars(threshold)) for threshold in (1.0, 0.95)),
    *(Row("mars-b4", mars(threshold)) for threshold in (1.0, 0.95)),
    Row("mars-b4", Decoding("lossless")),
    Row("ar-twice", Decoding("jacobi")),
    Row("ar-twice", Decoding("prompt_lookup")),
    Row("ar-twice", Decoding("speculative")),
]
# Table 3.
ABLATION = [
    Row("ar-twice"),
    *(
        Row(f"{name}-b{size}", mars(threshold))
        for name in ("mars-nosft", "mars")
        for size in BLOCK_SIZES
        for threshold in (1.0, 0.95)
    ),
]
# Table 15 and the quality-speed curve.
SWEEP = [
    Row("ar-twice"),
    *(Row(name, mars(tau)) for name in ("mars-b4", "mars-nosft-b4", "mars-b8") for tau in THRESHOLDS),
]
# Figure 7.
CONFIDENCE = [
    Row("ar-twice"),
    *(Row("mars-b4", mars(tau)) for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)),
    *(Row("mars-b4", mars(tau, "margin")) for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)),
    *(Row("mars-b4", mars(limit, "entropy")) for limit in (0.2, 0.3, 0.4, 0.6, 0.8, 1.0)),
]
# Table 5.
BATCH = [Decoding(), *(mars(0.95, cache=cache) for cache in ("none", "block-16", "block-32", "cursor"))]
# Training cost.
COST = ("ar-twice", "mars-b4", "mars-b8", "mars-b16", "mars-nosft-b4", "bd-b4")


@dataclass
class Scale:
    """How large, how long, on what data. Every field can be set on the command line.

    Attributes:
        model: a checkpoint to start from, or "arithmetic" for the small Llama and its arithmetic problems.
        draft_model: the same for the draft of speculative decoding.
        train_data, eval_data: a file of JSON lines with `question` and `answer`, or a data set's name on the Hub.
        steps, ar_steps: optimizer steps of the second and of the first stage; None to go by epochs.
        learning_rate, ar_learning_rate: of the two stages.
    """

    model: str = "arithmetic"
    draft_model: str = "arithmetic"
    train_data: str = "arithmetic"
    eval_data: str = "arithmetic"
    eval_examples: int = 150
    steps: int | None = 350
    ar_steps: int | None = 900
    epochs: float = 5
    learning_rate: float = 2e-3
    ar_learning_rate: float = 4e-3
    per_device_batch_size: int = 16
    gradient_accumulation: int = 1
    warmup_ratio: float = 0.05
    max_length: int = 512
    max_new_tokens: int = 64
    eval_batch_size: int = 50
    single_examples: int = 40
    timed_examples: int = 48
    timed_rounds: int = 3
    dtype: str = "float32"
    save_steps: int | None = None
    hidden_size: int = 64
    num_layers: int = 3


SCALES = {
    "tiny": Scale(),
    # The paper's: 8 GPUs x 48 = 384 rows a step, 5 epochs in each stage, warmup 0.03, rows of 512 tokens.
    "full": Scale(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        draft_model="Qwen/Qwen2.5-0.5B-Instruct",
        train_data="allenai/Dolci-Instruct-SFT",
        eval_data="openai/gsm8k",
        eval_examples=1319,
        steps=None,
        ar_steps=None,
        learning_rate=5e-6,
        ar_learning_rate=5e-6,
        per_device_batch_size=48,
        warmup_ratio=0.03,
        max_new_tokens=256,
        eval_batch_size=64,
        single_examples=200,
        timed_examples=200,
        dtype="bfloat16",
        save_steps=1000,
    ),
}


def fingerprint(name: str, scale: Scale, seed: int, given: Mapping[str, str] | None = None) -> str:
    """A folder name that changes with whatever changes the checkpoint of a system.

    Args:
        given: checkpoints that were not trained here, by system; such a one ends the chain that a system starts from.
    """
    training = {
        key: value
        for key, value in dataclasses.asdict(scale).items()
        if not key.startswith(("eval", "single", "timed", "max_new", "save"))
    }
    training["data_skipped"] = scale.eval_examples
    chain: list[Any] = [training]
    link: str | None = name
    while link is not None:
        chain.append({**dataclasses.asdict(SYSTEMS[link]), "label": None})
        if given and link in given:
            path = Path(given[link])
            chain.append(str(path.resolve()) if path.exists() else given[link])
            break
        link = SYSTEMS[link].start
    digest = hashlib.sha256(json.dumps(chain, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name}-seed{seed}-{digest}"
