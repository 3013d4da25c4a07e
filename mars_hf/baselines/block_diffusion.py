"""Block diffusion as BD3LM has it (Arriola et al. 2025, arXiv 2503.09573): who sees whom, the noise, and the loss.

Blocks of B tokens follow each other autoregressively; inside a block tokens are masked at random and see each other in
both directions. A training sequence is [clean stream; noisy stream]. Unlike MARS, a position predicts its own token.

Shapes: N rows of a batch, L tokens of a sequence, T tokens of a two-stream sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import CLEAN, Layout, dense_mask, full_layout

NOISY = 1


def sees(query: Layout, key: Layout, window: int | None = None) -> Tensor:
    """The rule of BD3LM: may `query` attend to `key`? Broadcasts the two layouts.

    A noisy token sees its own block of the noisy stream, in both directions, and the clean tokens of the blocks
    before; a clean token sees the clean tokens of the blocks up to its own. `window` intersects the rule with
    sliding-window attention. Nobody sees padding.
    """
    from_noisy, to_noisy = query.stream == NOISY, key.stream == NOISY
    from_clean, to_clean = query.stream == CLEAN, key.stream == CLEAN
    allowed = from_noisy & to_noisy & (key.block == query.block)
    allowed = allowed | (from_noisy & to_clean & (key.block < query.block))
    allowed = allowed | (from_clean & to_clean & (key.block <= query.block))
    if window is not None:
        allowed = allowed & (query.position - key.position < window)
    return allowed


def dense_block_mask(layout: Layout, window: int | None = None) -> Tensor:
    """The rule as a bool tensor (N, 1, T, T) for a layout of (N, T) fields; every token sees at least itself."""
    return dense_mask(layout, window, rule=sees)


def block_diffusion_mask(seq_length: int, block_size: int) -> Tensor:
    """The training mask in its full form, clean stream first: a bool tensor (2L, 2L), True where allowed.

    Args:
        seq_length: L, the length of the sequence in tokens.
        block_size: B; the last block is shorter where B does not divide L.

    Raises:
        ValueError: if either argument is not a positive integer.
    """
    return dense_block_mask(full_layout(seq_length, block_size, NOISY))[0, 0]


def draw_noise(is_target: Tensor, block: Tensor, noise_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Mask the targets of a sequence by the linear schedule: at noise level t a token is masked with probability t.

    Each block draws its own t, uniformly from `noise_range`; a narrower range is BD3LM's clipped schedule. Random
    numbers come from torch's global generator.

    Args:
        is_target: bool (L,), what may be masked.
        block: int64 (L,), the number of each token's block.
        noise_range: lowest and highest t, in (0, 1].

    Returns:
        bool (L,), what is masked; float32 (L,), the noise level t of each token's block.
    """
    low, high = noise_range
    level = low + (high - low) * torch.rand(int(block.max()) + 1)
    level = level[block]
    return is_target & (torch.rand(len(block)) < level), level


def block_diffusion_loss(
    log_probs: Tensor, is_masked: Tensor, noise_level: Tensor, num_targets: Tensor | int
) -> Tensor:
    """The negative ELBO of BD3LM under the linear schedule, per target: each masked token's -log p weighs 1/t.

    Args:
        log_probs: (N, T) log-probability of each position's own token; read where `is_masked`.
        is_masked: bool (N, T), the masked tokens of the noisy stream.
        noise_level: (N, T), t of each token's block.
        num_targets: supervised tokens of the whole accumulated batch, masked in this draw or not.

    Returns:
        A scalar; a differentiable zero for a batch without a masked token.
    """
    weights = torch.where(is_masked, 1 / noise_level, 0.0)
    return -(log_probs * weights).sum() / torch.as_tensor(num_targets, device=log_probs.device).clamp(min=1)
