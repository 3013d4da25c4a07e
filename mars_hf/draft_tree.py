"""The tree of a lossless step: drafts from two sources and the [MASK]s behind them, the most promising first.

Shapes: N rows still decoding, W tokens of a forward, T text tokens of a tree (the certain one and the drafts), K
tokens of its longest path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import torch
from torch import Tensor


@dataclass
class Sources:
    """What is proposed to follow a row's last certain token; all floats are probabilities.

    Attributes:
        masks: by depth from 1, the choices at the [MASK]s as (token, confidence), the likeliest first.
        lookup: what followed the same n-gram before.
        lookup_rate: of a token of `lookup` being right, where the one before it was.
        group_rates: by depth from 1, of the choice at a [MASK] being right together with all those before it.
    """

    masks: Sequence[Sequence[tuple[int, float]]]
    lookup: Sequence[int]
    lookup_rate: float
    group_rates: Sequence[float]

    def text_behind(self, leaf: Leaf) -> Iterator[Leaf]:
        """The drafts behind a text token. Where both sources propose a token, it is wrong only if both are."""
        depth = leaf.depth
        followed = self.lookup[depth] if leaf.by_lookup and depth < len(self.lookup) else None
        for token, chance in self.masks[depth] if leaf.by_masks and depth < len(self.masks) else ():
            agreed = token == followed
            if agreed:
                followed, chance = None, 1 - (1 - chance) * (1 - self.lookup_rate)
            yield Leaf(leaf.gain * chance, leaf, token, depth + 1, by_masks=True, by_lookup=agreed)
        if followed is not None:
            yield Leaf(leaf.gain * self.lookup_rate, leaf, followed, depth + 1, by_lookup=True)

    def mask_behind(self, leaf: Leaf) -> Leaf | None:
        """The first [MASK] behind a text token, or the next one behind a [MASK]."""
        node, masks = (leaf, 0) if leaf.token is not None else (leaf.parent, leaf.depth)
        if node is None or masks == len(self.group_rates):
            return None
        return Leaf(node.stops * self.group_rates[masks], node, None, masks + 1)


@dataclass(eq=False)
class Leaf:
    """A token that a step may feed: one of the text, or where `token` is None the next [MASK] behind its `parent`.

    Attributes:
        gain: the tokens that it is expected to be good for. A draft commits one if the text comes to it. A [MASK]
            commits one in the next step if the text comes to its group and no further, and the choice at it is right.
        depth: position, counted from the certain token; of a [MASK], from the token that its group is behind.
        by_masks, by_lookup: whether this source proposed all tokens from the certain one to this.
        stops: of a text token, the probability that the text comes to it and no further.
    """

    gain: float
    parent: Leaf | None
    token: int | None
    depth: int
    by_masks: bool = False
    by_lookup: bool = False
    stops: float = 0.0


def best_first(certain: int, sources: Sources, deepest: int) -> Iterator[Leaf]:
    """All tokens that a step may feed, by falling gain; none comes before the one that it hangs behind.

    Args:
        certain: the last certain token.
        sources: what may follow it.
        deepest: the last depth whose logits are of use; what is deeper lies beyond the end of the text.
    """
    heap = [(-1.0, 0, Leaf(1.0, None, certain, 0, by_masks=True, by_lookup=True))]
    pushed = 1
    while heap:
        leaf = heappop(heap)[2]
        behind = [] if leaf.token is None else [text for text in sources.text_behind(leaf) if text.depth <= deepest]
        if leaf.token is not None:
            leaf.stops = max(leaf.gain - sum(text.gain for text in behind), 0.0)
        mask = sources.mask_behind(leaf)
        # A [MASK] drafts the token behind its own place, and of a text that ends there a draft is of no use.
        if mask is not None and mask.parent is not None and mask.parent.depth + mask.depth < deepest:
            behind.append(mask)
        for found in behind:
            heappush(heap, (-found.gain, pushed, found))
            pushed += 1
        yield leaf


@dataclass
class DraftTree:
    """The tokens of one row's step, first those of the text, then [MASK]s. A token sees those that it hangs behind.

    Attributes:
        ids: the tokens.
        parents: what each of them hangs behind; -1 for the first, the certain token.
        children: of each text token, where its drafts stand, by their ids.
        groups: of each text token, where the [MASK]s behind it stand.
    """

    ids: list[int]
    parents: list[int]
    children: list[dict[int, int]]
    groups: list[range]

    def path(self, tokens: Iterable[int]) -> list[int]:
        """Where the certain token stands, and the drafts that these tokens are."""
        path = [0]
        for token in tokens:
            path.append(self.children[path[-1]][token])
        return path


def lay_out(leaves: Iterable[Leaf], mask_token_id: int) -> DraftTree:
    """A tree of these leaves, in the order of `best_first`.

    Text tokens stand in depth-first order, the likeliest first: where the likeliest drafts are confirmed, their keys
    and values are written to where they belong.
    """
    behind: dict[Leaf, list[Leaf]] = {}
    sizes: dict[Leaf, int] = {}
    for leaf in leaves:
        if leaf.token is None:
            assert leaf.parent is not None
            sizes[leaf.parent] = leaf.depth
            continue
        behind[leaf] = []
        if leaf.parent is not None:
            behind[leaf.parent].append(leaf)
    tree = DraftTree([], [], [], [])
    stack = [(next(iter(behind)), -1)]
    order: list[Leaf] = []
    while stack:
        leaf, parent = stack.pop()
        place = len(order)
        assert leaf.token is not None
        order.append(leaf)
        tree.ids.append(leaf.token)
        tree.parents.append(parent)
        tree.children.append({})
        if parent >= 0:
            tree.children[parent][leaf.token] = place
        stack += [(child, place) for child in reversed(behind[leaf])]
    for place, leaf in enumerate(order):
        start, size = len(tree.ids), sizes.get(leaf, 0)
        tree.groups.append(range(start, start + size))
        tree.ids += [mask_token_id] * size
        tree.parents += [place, *range(start, start + size - 1)][:size]
    return tree


@lru_cache(maxsize=4096)
def shape_of(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Depth (W,) int64 of every token of a tree, and (W, W) bool, which tokens each of them sees, on the host.

    A token without a parent stands at depth 0.
    """
    sees: list[list[bool]] = []
    for place, parent in enumerate(parents):
        sees.append([False] * len(parents) if parent < 0 else sees[parent].copy())
        sees[-1][place] = True
    visible = torch.tensor(sees, device="cpu")
    return visible.sum(-1) - 1, visible


class TreeBatch:
    """The trees of the N rows as tensors, filled up to one width W with [MASK]s that nobody sees.

    Attributes:
        ids: (N, W) int64.
        depth: (N, W) int64, positions counted from the certain token.
        sees: (N, W, W) bool.
        text_width: T, of the tree with the most text tokens.
        reach: K, tokens of the longest path of text tokens.
    """

    def __init__(self, trees: list[DraftTree], mask_token_id: int, device: torch.device) -> None:
        self.trees = trees
        self.width = max(len(tree.ids) for tree in trees)
        filler = [self.width - len(tree.ids) for tree in trees]
        parents = [tree.parents + [-1] * missing for tree, missing in zip(trees, filler, strict=True)]
        shapes = [shape_of(tuple(of_row)) for of_row in parents]
        depth = torch.stack([of_row for of_row, _ in shapes])
        self.text_width = max(len(tree.children) for tree in trees)
        self.reach = max(int(row[: len(tree.children)].max()) for row, tree in zip(depth, trees, strict=True)) + 1
        self.ids = torch.tensor(
            [tree.ids + [mask_token_id] * missing for tree, missing in zip(trees, filler, strict=True)], device=device
        )
        self.depth = depth.to(device)
        self.sees = torch.stack([of_row for _, of_row in shapes]).to(device)
        self.parents = torch.tensor(parents, device=device)

    def confirmed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Follow the text from the certain token on, as long as the token chosen behind a draft is itself a draft.

        That a token is chosen from the distribution behind its own prefix, whatever the drafts are, makes lossless
        sampling exact.

        Args:
            tokens: (N, T) the token chosen behind each text token; never a [MASK], so that no [MASK] is confirmed.

        Returns:
            (N, K) int64, where the tokens of the path stand, 0 behind its end; (N,) int64, its length.
        """
        width = tokens.shape[1]
        right = tokens.gather(1, self.parents[:, :width].clamp(min=0)) == self.ids[:, :width]
        right[:, 0] = True
        on_path = (right[:, None] | ~self.sees[:, :width, :width]).all(-1)
        places = torch.arange(width, device=tokens.device).expand_as(tokens)
        path = places.new_zeros(len(tokens), self.reach + 1)
        path.scatter_(1, self.depth[:, :width].where(on_path, self.reach), places)
        return path[:, : self.reach], on_path.sum(-1)
