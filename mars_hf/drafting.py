"""Lossless steps: one forward confirms the drafts of the step before and makes the next ones.

Shapes: N rows still decoding, D draft length, W tokens of a forward, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import MarsCache
from .masks import masks_for_model, tree_mask
from .proposing import CursorProposer
from .state import DecodingState


class DraftTree:
    """The tokens of a lossless forward: the last certain token, D drafts, and behind each of these D+1 tokens a group
    of D [MASK]s.

    Every group sees the tokens up to its own and itself, causally. The ordinary logits of the tokens confirm the
    drafts or correct the first wrong one; the group behind the last confirmed token makes the next drafts.

    Attributes:
        depth: (W,) positions, counted from the certain token.
        sees: (W, W) bool, which tokens each token sees.
    """

    def __init__(self, draft_length: int, device: torch.device) -> None:
        chain = torch.arange(draft_length + 1)
        group = (chain[:, None] + torch.arange(1, draft_length + 1)).flatten()
        self.depth = torch.cat([chain, group]).to(device)
        # The token that each one hangs behind: a token of the chain hangs behind itself, a [MASK] behind its group's.
        behind = torch.cat([chain, chain.repeat_interleave(draft_length)]).to(device)
        is_chain = torch.arange(len(self.depth), device=device) <= draft_length
        sees_chain = is_chain[None] & (self.depth[None] <= behind[:, None])
        same_group = ~is_chain[None] & ~is_chain[:, None] & (behind[:, None] == behind[None])
        self.sees = sees_chain | (same_group & (self.depth[None] <= self.depth[:, None]))


class DraftProposer(CursorProposer):
    """Proposes what the model itself confirms: its drafts, and the token behind the last one that is right.

    Attributes:
        drafts: (N, D) int64, what stands to be confirmed in this step; D is 0 in the first one.
    """

    def __init__(
        self, model: PreTrainedModel, draft_length: int, cache: MarsCache, model_kwargs: dict[str, Any], device: Any
    ) -> None:
        super().__init__(model, draft_length + 1, cache, model_kwargs)
        self.draft_length = draft_length
        self.tree = DraftTree(draft_length, device)
        self.drafts = torch.empty(0, 0, dtype=torch.long, device=device)
        self.groups = torch.empty(0)

    def propose(self, state: DecodingState) -> Tensor:
        """(N, D + 1, V) raw logits in float32, of the certain token and of each draft; (N, 1, V) in the first step."""
        chain = self.draft_length + 1
        if self.num_forwards == 0:
            logits = self.read_prompt(state, self.draft_length)[:, -chain:]
            self.drafts = state.tokens.new_empty(state.batch, 0)
            self.groups = logits[:, None, 1:]
            return logits[:, :1].to(device=state.device, dtype=torch.float32)
        logits = self._feed_tree(state)
        self.groups = logits[:, chain:].unflatten(1, (chain, self.draft_length))
        return logits[:, :chain].to(device=state.device, dtype=torch.float32)

    def _feed_tree(self, state: DecodingState) -> Tensor:
        width, count = len(self.tree.depth), len(state.host_rows)
        cursor = state.length - 1
        visible = max(state.host_length) - 1 + width
        slots = cursor[:, None] + torch.arange(width, device=state.device)
        aligned = len(set(state.host_length)) == 1
        self.cache.plan_write(slots, visible, first=state.host_length[0] - 1 if aligned else None)
        masks = state.tokens.new_full((count, width - 1 - self.draft_length), state.mask_token_id)
        certain = state.tokens[state.rows, cursor]
        columns = cursor[:, None] + self.tree.depth
        key_mask = torch.nn.functional.pad(state.key_mask[state.rows], (0, width), value=True)[:, :visible]
        return self.forward(
            input_ids=torch.cat([certain[:, None], self.drafts, masks], dim=-1),
            position_ids=state.positions[state.rows[:, None], columns],
            attention_mask=masks_for_model(
                self.model.config,
                self.model.dtype,
                lambda sliding: tree_mask(cursor, key_mask, self.tree.sees, self.tree.depth, sliding),
            ),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=width,
        )

    def settle(self, state: DecodingState, accepted: Tensor) -> None:
        """Keep what was confirmed, and take the drafts of the group behind the last confirmed token."""
        self.cache.commit(state.length - 1, [length - 1 for length in state.host_length])
        rows = torch.arange(len(accepted), device=self.groups.device)
        group = self.groups[rows, (accepted - 1).to(rows.device)]
        group[..., state.mask_token_id] = float("-inf")
        self.drafts = group.argmax(-1).to(state.device)

    def keep_rows(self, rows: list[int]) -> list[int]:
        order = super().keep_rows(rows)
        self.drafts = self.drafts[torch.tensor(order, dtype=torch.long, device=self.drafts.device)]
        return order
