"""What the plug-in reads from vLLM's configuration and from a request, checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

PROPOSER = "mars_hf.vllm.proposer.MarsProposer"
WORKER = "mars_hf.vllm.worker.MarsWorker"
# What the worker replaces in vLLM's model runner. Of a name that vLLM no longer calls nobody would notice.
REPLACED = ("_sample", "_bookkeeping_sync", "_input_fits_in_drafter")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MarsSettings:
    """What holds for all requests.

    Attributes:
        mask_token_id: id of [MASK].
        draft_length: [MASK]s behind the last token, and so drafts for the next step; one less than the window B.
    """

    mask_token_id: int
    draft_length: int

    @classmethod
    def from_vllm(cls, config: Any) -> MarsSettings:
        """Read the settings of a `VllmConfig`, whose checkpoint says which token is [MASK].

        Raises:
            ValueError: for a checkpoint without a mask token, and for options that the plug-in cannot work with.
        """
        check_engine(config)
        mask_token_id = config.model_config.try_get_generation_config().get("mars_mask_token_id")
        if mask_token_id is None:
            mask_token_id = getattr(config.model_config.hf_text_config, "mask_token_id", None)
        if mask_token_id is None:
            raise ValueError(
                f"{config.model_config.model} does not say which token is [MASK]. Serve a checkpoint that "
                "`MarsSFTTrainer` saved, or set `mars_mask_token_id` in its generation_config.json."
            )
        return cls(mask_token_id, config.speculative_config.num_speculative_tokens // 2)


def is_mars(config: Any) -> bool:
    """Whether a `VllmConfig` asks for this plug-in."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER


def check_engine(config: Any) -> None:
    """Refuse what cannot work, before a model is loaded.

    Raises:
        ValueError: says which option, why, and what to set instead.
    """
    if not is_mars(config):
        raise ValueError(
            f"{WORKER} needs its proposer: pass `--speculative-config "
            f'\'{{"method": "custom_class", "model": "{PROPOSER}", "num_speculative_tokens": 6}}\'`.'
        )
    count = config.speculative_config.num_speculative_tokens
    if count < 2 or count % 2:
        raise ValueError(
            f"`num_speculative_tokens` counts the drafts and as many [MASK]s behind them, so it must be even and at "
            f"least 2 (6 for a block size of 4), got {count}."
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("MARS does not work with pipeline parallelism; set `--tensor-parallel-size` instead.")
    if config.use_v2_model_runner:
        raise ValueError("MARS works in vLLM's V1 model runner only; set VLLM_USE_V2_MODEL_RUNNER=0.")


def check_runner(runner: Any) -> None:
    """Refuse a model runner that is not the one that the worker was written for.

    Raises:
        ValueError: names what is missing.
    """
    missing = [name for name in REPLACED if not hasattr(runner, name)]
    if missing:
        raise ValueError(
            f"The model runner of this vLLM has no {', '.join(missing)}, which MARS replaces. Install vLLM 0.32."
        )


def threshold_of(params: Any) -> float | None:
    """The threshold of a request's `SamplingParams`; None for lossless decoding.

    A request with an invalid one, which some front end has let pass, is decoded losslessly: in the worker an error
    would end all requests.
    """
    threshold = (params.extra_args or {}).get("mars_threshold")
    if threshold is None:
        return None
    if not _is_threshold(threshold):
        _warn_of_threshold()
        return None
    return float(threshold)


def _is_threshold(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


@cache
def _warn_of_threshold() -> None:
    """Once in a process."""
    logger.warning(
        "A request's `mars_threshold` is not a number in (0, 1] and was not checked where it came in: this front end "
        "does not run the plug-in `mars`. Such requests are decoded losslessly."
    )


def check_request(params: Any) -> None:
    """Check the `mars_*` entries of a request's `SamplingParams.extra_args`, and what does not work with MARS at all.

    Raises:
        ValueError: for an unknown entry, a threshold outside (0, 1], or a parameter that is not available.
    """
    extra: Mapping[str, Any] = params.extra_args or {}
    unknown = [name for name in extra if name.startswith("mars") and name != "mars_threshold"]
    if unknown:
        raise ValueError(
            f"Unknown {', '.join(unknown)}: a request may set `mars_threshold`, or nothing for lossless decoding."
        )
    for name in ("thinking_token_budget", "logprob_token_ids"):
        if getattr(params, name, None) is not None:
            raise ValueError(f"`{name}` is not available with MARS; leave it out.")
    threshold = extra.get("mars_threshold")
    if threshold is not None and not _is_threshold(threshold):
        raise ValueError(
            f"`mars_threshold` must be a number in (0, 1]; 1.0 is plain autoregressive decoding. Got {threshold!r}."
        )
