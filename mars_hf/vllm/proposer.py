"""The proposer that vLLM asks for drafts: it hands on what the sampler planned."""

from __future__ import annotations

from typing import Any

from .sampler import MarsSampler
from .settings import WORKER, MarsSettings


class MarsProposer:
    """vLLM's `custom_class` proposer.

    vLLM shows a proposer tokens and no logits, so the worker gives it the sampler, which has seen them.

    Attributes:
        settings: of the engine.
        sampler: set by the worker.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.settings = MarsSettings.from_vllm(vllm_config)
        self.sampler: MarsSampler | None = None
        if vllm_config.parallel_config.worker_cls != WORKER:
            raise ValueError(f"The MARS proposer needs its worker: pass `--worker-cls {WORKER}`.")

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The model that is served is all there is."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Drafts and [MASK]s of every request of the batch, from the tokens it was given in this step."""
        assert self.sampler is not None
        return self.sampler.next_drafts(sampled_token_ids)
