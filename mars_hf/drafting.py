"""Lossless steps: one forward confirms the drafts of the step before and makes the next ones.

Shapes: N rows still decoding, W tokens of a forward, T text tokens of a tree, K tokens of its longest path, V
vocabulary.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import MarsCache
from .draft_options import WIDEST, DraftOptions
from .draft_tree import DraftTree, Sources, TreeBatch, best_first, lay_out
from .masks import tree_mask
from .pacing import costs_of
from .proposing import CursorProposer
from .row_drafts import RowDrafts
from .state import DecodingState
from .tree_budget import PayingWidth


class DraftProposer(CursorProposer):
    """Proposes what the model itself confirms: drafts of the [MASK]s and of the rows' n-grams, in one tree a row.

    The ordinary logits of the text tokens confirm the drafts or correct the first wrong one; the [MASK]s behind the
    last confirmed token make the next drafts.

    Attributes:
        trees: the trees of the step that is under way.
    """

    def __init__(
        self, model: PreTrainedModel, options: DraftOptions, cache: MarsCache, model_kwargs: dict[str, Any]
    ) -> None:
        super().__init__(model, options.reach, cache, model_kwargs)
        self.options = options
        self.rows: list[RowDrafts] = []
        self.trees: TreeBatch
        self.logits: Tensor
        self.start: Tensor
        self.host_length: list[int] = []
        self.costs = costs_of(model)
        self.paying_width = PayingWidth(self.costs) if options.budget == "auto" else None
        self.began = 0.0

    def propose(self, state: DecodingState) -> Tensor:
        """(N, T, V) raw logits in float32, behind each text token of the rows' trees."""
        self.began = time.perf_counter()
        self.start, self.host_length = state.length - 1, state.host_length
        if self.num_forwards == 0:
            self._start_rows(state)
            self.logits = self._read_prompt_and_masks(state)
        else:
            self.trees = TreeBatch(self._grow(state), state.mask_token_id, state.device)
            self.logits = self._feed_trees(state)
        return self.logits[:, : self.trees.text_width].to(device=state.device, dtype=torch.float32)

    def _read_prompt_and_masks(self, state: DecodingState) -> Tensor:
        """The logits of the first forward, whose tree is the prompt's last token and the [MASK]s behind it."""
        masks = max(min(self.options.length, state.max_length - state.prompt - 2), 0)
        if isinstance(self.options.budget, int):
            masks = min(masks, self.options.budget - 1)
        tree = lay_out(best_first(0, Sources([], [], 0.0, [1.0] * masks), masks + 1), state.mask_token_id)
        self.trees = TreeBatch([tree] * state.batch, state.mask_token_id, state.device)
        return self.read_prompt(state, masks)[:, -masks - 1 :]

    def _grow(self, state: DecodingState) -> list[DraftTree]:
        """The trees of a step, no larger than the budget."""
        budget = self.options.budget
        limit = WIDEST if isinstance(budget, str) else budget
        leaves = [
            list(islice(row.grow(deepest=state.max_length - length - 1), limit))
            for row, length in zip(self.rows, state.host_length, strict=True)
        ]
        if self.paying_width is not None:
            width = self.paying_width.choose([[leaf.gain for leaf in of_row] for of_row in leaves])
            leaves = [of_row[:width] for of_row in leaves]
        return [lay_out(of_row, state.mask_token_id) for of_row in leaves]

    def _start_rows(self, state: DecodingState) -> None:
        """Tell every row its prompt, without padding and without what is known as embeddings only."""
        shown = state.tokens[:, state.hidden : state.prompt].tolist()
        kept = state.key_mask[:, state.hidden : state.prompt].tolist()
        for tokens, is_text in zip(shown, kept, strict=True):
            text = [token for token, keep in zip(tokens, is_text, strict=True) if keep]
            self.rows.append(RowDrafts(self.options, text))

    def _feed_trees(self, state: DecodingState) -> Tensor:
        trees, cursor = self.trees, state.length - 1
        slots = cursor[:, None] + torch.arange(trees.width, device=state.device)
        visible = max(state.host_length) - 1 + trees.width
        aligned = len(set(state.host_length)) == 1
        self.cache.plan_write(slots, visible, first=state.host_length[0] - 1 if aligned else None)
        key_mask = torch.nn.functional.pad(state.key_mask[state.rows], (0, trees.width), value=True)[:, :visible]
        make_mask = partial(tree_mask, cursor, key_mask, trees.sees, trees.depth)
        return self.forward_columns(state, trees.ids, cursor[:, None] + trees.depth, trees.width, make_mask)

    def confirmed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.trees.confirmed(tokens)

    @property
    def reach(self) -> int:
        return self.trees.reach

    def place_behind(self, row: int, place: int, token: int) -> int | None:
        return self.trees.trees[row].children[place].get(token)

    def settle(self, state: DecodingState, accepted: Tensor) -> None:
        """Keep what was confirmed, and take the drafts of the [MASK]s behind the last confirmed token."""
        columns = self.start[:, None] + 1 + torch.arange(self.trees.reach, device=state.device)
        tokens = state.tokens[state.rows[:, None], columns].tolist()
        if self.num_forwards > 1 and self.paying_width is not None:
            # The tokens are here, so the device has done its work.
            self.costs.record(len(self.rows), self.trees.width, time.perf_counter() - self.began)
        counts = [new - old for new, old in zip(state.host_length, self.host_length, strict=True)]
        paths = []
        for row, tree, candidates, count in zip(self.rows, self.trees.trees, tokens, counts, strict=True):
            row.learn(candidates[:count])
            paths.append(tree.path(candidates[: count - 1]))
        self._keep_paths(paths)
        self.cache.commit(state.length - 1, [length - 1 for length in state.host_length])
        groups = [tree.groups[path[-1]] for tree, path in zip(self.trees.trees, paths, strict=True)]
        for row, choices in zip(self.rows, self._choices(groups, state.mask_token_id), strict=True):
            row.choices = choices

    def _keep_paths(self, paths: list[list[int]]) -> None:
        """Move the keys and values of the confirmed tokens to where the text goes on."""
        longest = max(len(path) for path in paths)
        if all(path == list(range(len(path))) for path in paths):
            return
        moved = torch.tensor([path + list(range(len(path), longest)) for path in paths], device=self.start.device)
        target = self.start[:, None] + torch.arange(longest, device=self.start.device)
        self.cache.copy_slots(self.start[:, None] + moved, target)

    def _choices(self, groups: list[range], mask_token_id: int) -> list[list[list[tuple[int, float]]]]:
        """For every row and [MASK] of its group the likeliest tokens, each with its probability."""
        longest = max(len(group) for group in groups)
        if longest == 0:
            return [[] for _ in groups]
        device = self.logits.device
        places = torch.tensor([[*group, *[0] * (longest - len(group))] for group in groups], device=device)
        logits = self.logits[torch.arange(len(groups), device=device)[:, None], places].float()
        logits[..., mask_token_id] = float("-inf")
        # One pass of one kernel each; on CPU `topk` and `logsumexp` take several.
        chances = logits.softmax(-1)
        best = chances.argmax(-1, keepdim=True) if self.options.choices == 1 else chances.topk(self.options.choices)[1]
        chances = chances.gather(-1, best)
        # One transfer for both, as the integers that the bits of the chances are: not every device has float64.
        ids, bits = torch.stack([best, chances.view(torch.int32).long()]).cpu()
        host_ids, host_chances = ids.tolist(), bits.int().view(torch.float32).tolist()
        return [
            [list(zip(*of_mask, strict=True)) for of_mask in list(zip(*of_row, strict=True))[: len(group)]]
            for *of_row, group in zip(host_ids, host_chances, groups, strict=True)
        ]

    def keep_rows(self, rows: list[int]) -> list[int]:
        order = super().keep_rows(rows)
        self.rows = [self.rows[row] for row in order]
        return order
