"""The rows of a batch while they decode: their tokens, how far each has come, and which ones are still there.

Shapes: N rows still decoding of the batch's R, P prompt columns, B the window (MARS block size). Columns count from
the left edge of the left-padded batch; the slots of the cache are the same columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DecodingState:
    """Where every row stands. Rows leave when they end, so fields of N shrink; fields of R keep the batch's order.

    The host keeps the lengths in a list too, to size the forwards, so that it waits for the device once a step, in
    `advance`.

    Args:
        input_ids: (R, prompt) integers, the prompts, padded on the left.
        max_length: columns of a full sequence, counted as `input_ids` are.
        window: B.
        mask_token_id: id of [MASK].
        attention_mask: (R, P) zero for padding, or None.
        position_ids: (R or 1, P) position ids of the prompts; by default they count what is not padding.
        hidden: columns in front of `input_ids`, of prompts that are given as embeddings only.

    Attributes:
        tokens: (R, columns) int64; behind a row's last token stand [MASK]s, ready to be fed.
        positions: (R, columns) int64, position ids.
        key_mask: (R, columns) bool, False for padding.
        rows: (N,) int64, which row of the batch each is.
        length: (N,) int64, columns of the prompt and of what is accepted so far.
    """

    def __init__(
        self,
        input_ids: Tensor,
        max_length: int,
        window: int,
        mask_token_id: int,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden: int = 0,
    ) -> None:
        self.hidden, self.max_length = hidden, max_length + hidden
        input_ids = torch.nn.functional.pad(input_ids.long(), (hidden, 0), value=mask_token_id)
        self.batch, self.prompt = input_ids.shape
        self.device, self.mask_token_id = input_ids.device, mask_token_id
        tail = self.max_length + window - self.prompt
        prompt_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.tokens = torch.nn.functional.pad(input_ids, (0, tail), value=mask_token_id)
        self.key_mask = torch.nn.functional.pad(prompt_mask.bool(), (0, tail), value=True)
        if position_ids is None:
            position_ids = (prompt_mask.long().cumsum(-1) - 1).clamp(min=0)
        position_ids = position_ids.expand(self.batch, -1)
        # [MASK]s behind the last allowed token are never accepted; their positions stay within the model's reach.
        following = torch.arange(1, tail + 1, device=self.device).clamp(max=self.max_length - self.prompt)
        self.positions = torch.cat([position_ids, position_ids[:, -1:] + following], dim=-1)
        self.rows = torch.arange(self.batch, device=self.device)
        self.length = torch.full((self.batch,), self.prompt, device=self.device)
        self.host_rows = list(range(self.batch))
        self.host_length = [self.prompt] * self.batch
        self.accepted_lengths: list[Tensor] = []

    def advance(self, tokens: Tensor, accepted: Tensor, ended: Tensor) -> tuple[list[int], list[int]]:
        """Write what a step accepted.

        Args:
            tokens: (N, B) candidates.
            accepted: (N,) how many of them are accepted.
            ended: (N,) bool, whether the row ends with them.

        Returns:
            The tokens that each of the N rows accepted, and 1 where the row ended, else 0; on the host.
        """
        offset = torch.arange(tokens.shape[1], device=self.device)
        kept = offset < accepted[:, None]
        columns = self.length[:, None] + offset
        self.tokens[self.rows[:, None], columns] = tokens.where(kept, self.mask_token_id)
        self.length = self.length + accepted
        # The one synchronisation of a step: the host learns how far every row went and which ones ended.
        host_accepted, host_ended = torch.stack([accepted, ended.long()]).tolist()
        record = [0] * self.batch
        for row, count in zip(self.host_rows, host_accepted, strict=True):
            record[row] = count
        self.accepted_lengths.append(torch.tensor(record, device="cpu"))
        self.host_length = [length + new for length, new in zip(self.host_length, host_accepted, strict=True)]
        return host_accepted, host_ended

    def text(self, columns: int) -> Tensor:
        """(R, columns - hidden) the first columns of every row, for processors and criteria.

        Behind a shorter text its last token comes again: it holds the same tokens then, and no [MASK].
        """
        places = torch.arange(columns, device=self.device)
        tokens = self.tokens[:, :columns]
        is_text = (tokens != self.mask_token_id) | (places < self.prompt)
        lasts = places.where(is_text, 0).cummax(-1).values
        return tokens.gather(1, lasts)[:, self.hidden :]

    def keep_rows(self, order: list[int]) -> None:
        """Keep these of the N rows, in this order."""
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.rows, self.length = self.rows[index], self.length[index]
        self.host_rows = [self.host_rows[row] for row in order]
        self.host_length = [self.host_length[row] for row in order]

    def sequences(self, pad_token_id: Tensor | None) -> Tensor:
        """(R, columns of the longest row) what of the prompts has ids, and replies, padded on the right."""
        new_tokens = torch.stack(self.accepted_lengths).sum(0)
        columns = torch.arange(self.prompt + int(new_tokens.max()), device=self.device)
        sequences = self.tokens[:, : len(columns)]
        if pad_token_id is None:
            return sequences[:, self.hidden :]
        used = columns < self.prompt + new_tokens.to(self.device)[:, None]
        return sequences.where(used, pad_token_id.to(self.device))[:, self.hidden :]
