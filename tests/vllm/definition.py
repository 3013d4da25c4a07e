"""MARS decoding from its definition: no cache, no batch, one plain causal forward a step; for any transformers."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def decode(
    model: Any, prompt: list[int], tau: float, stop: int, mask: int, window: int, limit: int, penalty: float = 1.0
) -> tuple[list[int], int]:
    """The new tokens of one prompt, and the forwards it took; `tau` of 1 is autoregressive decoding.

    A repetition penalty changes which token is chosen, not how sure the model is of it.

    The prompt's forward gives one token alone, as in vLLM, whose scheduler feeds no drafts behind a prompt.
    """
    text, forwards = list(prompt), 0
    while True:
        masks = 0 if forwards == 0 or tau >= 1 else window - 1
        logits = model(torch.tensor([text + [mask] * masks])).logits[0, len(text) - 1 :].float()
        forwards += 1
        for k in range(masks + 1):
            seen = torch.tensor(sorted(set(text)))
            scores = logits[k].index_fill(0, torch.tensor(mask), -torch.inf)
            scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
            token = int(scores.argmax())
            if k > 0 and logits[k].softmax(-1)[token] < torch.tensor(tau):
                break
            text.append(token)
            if token == stop or len(text) - len(prompt) == limit:
                return text[len(prompt) :], forwards
