"""The tree of a lossless step: its drafts from two sources, what it feeds, and which branch is confirmed."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from decoding_models import MASK, SHAPE, left_pad, random_prompts, tiny_model
from test_lossless import MAX_NEW, agreeing_model, lossless, stock
from transformers import LlamaConfig, LlamaForCausalLM

from mars_hf import MarsCache, MarsGenerationMixin, get_mars_model
from mars_hf.draft_options import DraftOptions
from mars_hf.draft_tree import Leaf, Sources, best_first, lay_out, shape_of
from mars_hf.drafting import DraftProposer
from mars_hf.lookup import NgramLookup
from mars_hf.state import DecodingState

WRONG = 59


class Scripted(MarsGenerationMixin, LlamaForCausalLM):
    """Answers by position alone: a token of the text with the text's next one, a [MASK] with its draft for it.

    Attributes:
        text: the text, prompt included.
        drafts: what a [MASK] says of each position of the text.
        hint: logit of the text's own token at a [MASK]; that of the draft is 4.
        widths: tokens per row of each forward.
    """

    def script(self, text: list[int], drafts: list[int], hint: float) -> None:
        self.text, self.drafts, self.hint, self.widths = torch.tensor(text), torch.tensor(drafts), hint, []

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        self.widths.append(input_ids.shape[1])
        kept = output.logits.shape[1]
        ids, following = input_ids[:, -kept:], position_ids[:, -kept:] + 1
        said = self.drafts[following].where(ids == MASK, self.text[following])
        one_hot = partial(torch.nn.functional.one_hot, num_classes=output.logits.shape[-1])
        output.logits = 4.0 * one_hot(said) + self.hint * one_hot(self.text[following])
        return output


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    torch.manual_seed(0)
    return get_mars_model(Scripted(LlamaConfig(**SHAPE)).eval(), mask_token_id=MASK, block_size=4)


PROMPT, NEW = 12, 25
# No token comes twice, so there is nothing to look up.
PLAIN = list(range(3, 3 + PROMPT + NEW))
# Three tokens over and over: after one round the n-grams know the text.
ROUND = [10 + i % 3 for i in range(PROMPT + NEW)]
# Every other token is the same, and what came behind it never comes again.
MISLEADING = [50 if i % 2 else 3 + i for i in range(PROMPT + NEW)]
NEVER = [WRONG] * (PROMPT + NEW)


def run_script(model: Scripted, text: list[int], drafts: list[int], hint: float = 0.0, **kwargs) -> list[int]:
    """Tokens that each forward committed, after a check that they are those of the text."""
    padding = [0] * 16
    model.script(text + padding, drafts + padding, hint)
    output = lossless(
        model, {"input_ids": torch.tensor([text[:PROMPT]])}, max_new_tokens=NEW, eos_token_id=None, **kwargs
    )
    assert output.sequences[0].tolist() == text
    assert output.num_forwards == len(model.widths)
    return output.accepted_lengths[0].tolist()


@pytest.mark.parametrize(
    ("drafts", "steps"),
    [
        (PLAIN, [1, 4, 4, 4, 4, 4, 4]),
        (NEVER, [1] * NEW),
        # Right at even positions only: a step confirms the even one and corrects the odd one.
        ([token if i % 2 == 0 else WRONG for i, token in enumerate(PLAIN)], [1] * 2 + [2] * 11 + [1]),
        # Right at odd positions only: the prompt has an even number of tokens.
        ([token if i % 2 == 1 else WRONG for i, token in enumerate(PLAIN)], [1] + [2] * 12),
    ],
    ids=["all", "none", "even", "odd"],
)
def test_scripted_drafts(scripted, drafts, steps):
    assert run_script(scripted, PLAIN, drafts) == steps
    # A tree of four text tokens, each with three [MASK]s behind it.
    assert max(scripted.widths[1:]) == 16


# More than any tree here has.
FULL = {"mars_tree_budget": 99}


def test_lookup_wins_where_masks_are_wrong(scripted):
    assert run_script(scripted, ROUND, NEVER, prompt_lookup_num_tokens=5, **FULL) == [1, 6, 6, 6, 6]
    # The certain token, three and five drafts, and three [MASK]s behind each.
    assert scripted.widths[1] == (1 + 3 + 5) * 4


def test_lookup_loses_where_it_misleads(scripted):
    assert run_script(scripted, MISLEADING, MISLEADING, prompt_lookup_num_tokens=5) == [1, 4, 4, 4, 4, 4, 4]
    assert run_script(scripted, MISLEADING, NEVER, prompt_lookup_num_tokens=5) == [1] * NEW


def test_sources_share_what_they_agree_on(scripted):
    # The [MASK]s are right about the next two tokens of a step and wrong about the third.
    drafts = [token if (i - PROMPT) % 6 in (1, 2) else WRONG for i, token in enumerate(ROUND)]
    assert run_script(scripted, ROUND, drafts, prompt_lookup_num_tokens=5, **FULL) == [1, 6, 6, 6, 6]
    assert scripted.widths[1] == (1 + 5 + 1) * 4


def test_longer_lookups_than_masks_and_the_other_way_round(scripted):
    assert run_script(scripted, ROUND, NEVER, mars_draft_length=1, prompt_lookup_num_tokens=7, **FULL) == [1, 8, 8, 8]
    assert run_script(scripted, ROUND, ROUND, mars_draft_length=7, prompt_lookup_num_tokens=1, **FULL) == [1, 8, 8, 8]


@pytest.mark.parametrize("kwargs", [{}, {"prompt_lookup_num_tokens": 10}, {"mars_draft_choices": 3}])
def test_a_tree_is_bounded_by_default(scripted, kwargs):
    assert max(run_script(scripted, ROUND, ROUND, mars_draft_length=4, **kwargs)) > 1
    assert max(scripted.widths[1:]) == 24
    run_script(scripted, ROUND, ROUND, mars_draft_length=6, mars_tree_budget=49)
    assert max(scripted.widths[1:]) == 49


def test_second_choice_of_a_mask(scripted):
    kwargs = {"mars_draft_length": 1, "mars_tree_budget": 6, "hint": 2.0}
    assert run_script(scripted, PLAIN, NEVER, **kwargs) == [1] * NEW
    assert run_script(scripted, PLAIN, NEVER, mars_draft_choices=2, **kwargs) == [1] + [2] * 12


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        (1, [1] * NEW),
        # A draft or a [MASK]: one step confirms, the next one makes the draft.
        (2, [1, 2] * 8 + [1]),
        (3, None),
        (8, None),
        (16, [1, 4, 4, 4, 4, 4, 4]),
        (99, [1, 4, 4, 4, 4, 4, 4]),
    ],
)
def test_budget(scripted, budget, steps):
    found = run_script(scripted, PLAIN, PLAIN, mars_tree_budget=budget)
    assert max(scripted.widths[1:]) <= budget
    assert scripted.widths[0] <= PROMPT + min(budget - 1, 3)
    if steps is not None:
        assert found == steps


def test_larger_budgets_take_fewer_forwards(scripted):
    counts = [len(run_script(scripted, PLAIN, PLAIN, mars_tree_budget=budget)) for budget in (1, 2, 4, 8, 16)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[4]


# --- against brute force ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@torch.no_grad()
def test_every_path_of_a_tree_runs_as_if_alone(family):
    model = tiny_model(family)
    prompts = random_prompts([5, 11, 8])
    inputs = left_pad(prompts)
    options = DraftOptions(3, choices=2, lookup=4, budget=64)
    state = DecodingState(inputs["input_ids"], 40, options.reach, MASK, inputs["attention_mask"])
    proposer = DraftProposer(model, options, MarsCache(), {"attention_mask": inputs["attention_mask"]})
    proposer.propose(state)
    certain = torch.tensor([[9], [8], [7]])
    state.advance(certain, torch.ones(3, dtype=torch.long), torch.zeros(3, dtype=torch.bool))
    proposer.settle(state, torch.ones(3, dtype=torch.long))
    for seed, row in enumerate(proposer.rows):
        guess = torch.randint(3, MASK, (3, 2), generator=torch.Generator().manual_seed(seed)).tolist()
        row.choices = [[(a, 0.4), (b, 0.2)] for a, b in guess]
        # Other text than the row's own, so that something is found; agrees with the [MASK]s' first choice.
        row.text.extend([certain[seed].item(), guess[0][0], 20, 21, 22, certain[seed].item()])
    proposer.propose(state)
    checked = set()
    for row, (prompt, tree) in enumerate(zip(prompts, proposer.trees.trees, strict=True)):
        assert len(tree.ids) == 64
        for place in range(len(tree.ids)):
            path, at = [], place
            while at >= 0:
                path.insert(0, tree.ids[at])
                at = tree.parents[at]
            checked.add((len(path), path.count(MASK)))
            alone = model(torch.tensor([prompt.tolist() + path])).logits[0, -1]
            torch.testing.assert_close(proposer.logits[row, place], alone, atol=1e-4, rtol=1e-4)
    # (tokens, [MASK]s) of paths: the certain token, [MASK]s behind it, drafts of both sources, [MASK]s behind those.
    assert {(1, 0), (2, 1), (4, 3), (4, 0), (5, 0), (7, 3)} <= checked


def gains_by_definition(sources: Sources, deepest: int) -> list[float]:
    """The gains of all tokens that a step may feed, from what they are good for."""
    text = {(): 1.0}
    levels = len(sources.masks), len(sources.lookup)
    for depth in range(1, min(max(levels), deepest) + 1):
        for path in [path for path in text if len(path) == depth - 1]:
            chances: dict[int, list[float]] = {}
            if depth <= levels[0] and all(t in dict(c) for t, c in zip(path, sources.masks, strict=False)):
                for token, chance in sources.masks[depth - 1]:
                    chances.setdefault(token, []).append(chance)
            if depth <= levels[1] and list(path) == sources.lookup[: depth - 1]:
                chances.setdefault(sources.lookup[depth - 1], []).append(sources.lookup_rate)
            for token, of_sources in chances.items():
                wrong = 1.0
                for chance in of_sources:
                    wrong *= 1 - chance
                text[*path, token] = text[path] * (1 - wrong)
    gains = list(text.values())
    for path, reach in text.items():
        stops = reach - sum(other for child, other in text.items() if child[:-1] == path and child)
        for depth, rate in enumerate(sources.group_rates, 1):
            if len(path) + depth < deepest:
                gains.append(max(stops, 0.0) * rate)
    return sorted(gains, reverse=True)


SOURCES = [
    Sources([], [], 0.0, [0.6, 0.4]),
    Sources([[(5, 0.9)], [(6, 0.5)], [(7, 0.2)]], [], 0.0, [0.6, 0.4, 0.3]),
    Sources([[(5, 0.9)], [(6, 0.5)]], [5, 8, 9, 9], 0.7, [0.6, 0.4]),
    Sources([[(5, 0.6), (6, 0.3)], [(7, 0.4), (5, 0.3)]], [6, 7, 5], 0.8, [0.5, 0.3]),
]


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("deepest", [0, 1, 2, 9])
def test_best_first_against_its_definition(sources, deepest):
    leaves = list(best_first(4, sources, deepest))
    gains = [leaf.gain for leaf in leaves]
    assert gains == pytest.approx(gains_by_definition(sources, deepest))
    for place, leaf in enumerate(leaves):
        assert leaf.parent is None or leaf.parent in leaves[:place]
    for budget in range(1, len(leaves) + 1):
        tree = lay_out(itertools.islice(best_first(4, sources, deepest), budget), MASK)
        assert len(tree.ids) == budget
        assert tree.ids[0] == 4
        assert all(parent < place for place, parent in enumerate(tree.parents))
        for place, (children, group) in enumerate(zip(tree.children, tree.groups, strict=True)):
            assert all(tree.ids[child] == token and tree.parents[child] == place for token, child in children.items())
            behind = place
            for at in group:
                assert tree.ids[at] == MASK
                assert tree.parents[at] == behind
                behind = at
    assert isinstance(leaves[0], Leaf)


def test_likeliest_branch_stands_first():
    tree = lay_out(best_first(4, SOURCES[2], 9), MASK)
    # 5 is proposed by both; behind it the n-gram's 8 is likelier than the [MASK]'s 6.
    assert tree.ids[: len(tree.children)] == [4, 5, 8, 9, 9, 6]
    assert tree.path([5, 6]) == [0, 1, 5]


def test_shape_of_a_tree():
    depth, sees = shape_of((-1, 0, 1, 0, -1))
    assert depth.tolist() == [0, 1, 2, 1, 0]
    assert sees.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_lookup_against_a_search(size):
    text = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(size)).tolist()
    lookup = NgramLookup(size)
    lookup.extend(text[:7])
    for end in range(7, len(text)):
        lookup.extend(text[end : end + 1])
        seen = text[: end + 1]
        expected, found = [], 0
        for length in range(size, 0, -1):
            starts = [s for s in range(length, len(seen)) if seen[s - length : s] == seen[-length:]]
            if starts:
                period = len(seen) - starts[-1]
                expected, found = [seen[starts[-1] + i % period] for i in range(6)], length
                break
        assert lookup.propose(6) == (expected, found)


# --- through the cache -----------------------------------------------------------------------------------------------

BOTH = [
    {"prompt_lookup_num_tokens": 5},
    {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 3, "mars_tree_budget": 9},
    {"prompt_lookup_num_tokens": 4, "mars_tree_budget": 20, "mars_draft_choices": 2, "mars_draft_length": 4},
    {"mars_tree_budget": 3},
    {"prompt_lookup_num_tokens": 10, "mars_tree_budget": "auto"},
]


@pytest.fixture
def moves(monkeypatch) -> list[torch.Tensor]:
    """What the cache is told to move."""
    calls = []
    copy_slots = MarsCache.copy_slots

    def record(self, source, target):
        calls.append(source - target)
        copy_slots(self, source, target)

    monkeypatch.setattr(MarsCache, "copy_slots", record)
    return calls


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2"])
def test_any_branch_equals_stock_generate(family, moves):
    model = agreeing_model(family)
    prompts = random_prompts([5, 11, 3, 8, 6, 9, 14, 4])
    batch = left_pad(prompts)
    expected = stock(model, batch, eos_token_id=None)
    for kwargs in BOTH:
        output = lossless(model, batch, eos_token_id=None, **kwargs)
        assert torch.equal(output.sequences, expected)
        alone = lossless(model, left_pad(prompts[1:2]), eos_token_id=None, **kwargs)
        assert torch.equal(alone.sequences[0, -MAX_NEW:], expected[1, -MAX_NEW:])
        if kwargs.get("mars_tree_budget") != "auto":
            # A row's trees do not depend on its batch.
            steps = output.accepted_lengths[1]
            assert steps[steps > 0].tolist() == alone.accepted_lengths[0].tolist()
            assert output.tokens_per_forward.mean() > 1.1
    assert any(bool((shift > 0).any()) for shift in moves)


def test_rows_share_the_width_of_a_budget():
    model = agreeing_model()
    widths = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    lossless(model, left_pad(random_prompts([5, 11, 3, 8])), prompt_lookup_num_tokens=5, mars_tree_budget=10)
    hook.remove()
    assert max(widths[1:]) == 10


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 9},
        {"eos_token_id": [2, 7, 11, 30]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 3},
    ],
)
def test_processors_and_limits_with_both_sources(kwargs):
    model = agreeing_model(seed=1)
    inputs = left_pad(random_prompts([6, 9, 4]), extra=3)
    both = {"prompt_lookup_num_tokens": 4, "mars_tree_budget": 20, "mars_draft_choices": 2}
    output = lossless(model, inputs, **both, **kwargs, output_scores=True)
    expected = stock(model, inputs, **kwargs, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    for step, (ours, theirs) in enumerate(zip(output.scores, expected.scores, strict=True)):
        going = output.accepted_lengths.sum(-1) > step
        torch.testing.assert_close(ours[going], theirs[going], atol=1e-3, rtol=1e-3)


def test_next_turn_with_both_sources():
    model = agreeing_model(seed=3)
    both = {"prompt_lookup_num_tokens": 5, "eos_token_id": None}
    first = lossless(model, left_pad(random_prompts([7, 7])), **both)
    text = torch.cat([first.sequences, torch.tensor([[5, 6, 7]] * 2)], dim=-1)
    second = lossless(model, {"input_ids": text, "cache": first.cache}, **both)
    assert torch.equal(second.sequences, stock(model, {"input_ids": text}, eos_token_id=None))
    embeds = model.get_input_embeddings()(text)
    assert torch.equal(
        lossless(model, {"inputs_embeds": embeds}, **both).sequences, second.sequences[:, text.shape[1] :]
    )


# --- sampling --------------------------------------------------------------------------------------------------------


def five_token_model(seed: int = 0) -> MarsGenerationMixin:
    """Five tokens and [MASK]; unsure, and often of one mind with its drafts."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 6})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 if "embed" in name else 0.25)
        embedding = model.get_input_embeddings().weight
        embedding.copy_(embedding.mean(0) + 0.1 * embedding)
    return get_mars_model(model, mask_token_id=5, block_size=4)


@torch.no_grad()
def exact_distribution(model, prompt, length, temperature, top_k, top_p) -> torch.Tensor:
    """The probability of every text of `length` tokens of 5 behind the prompt, by enumeration: (5,) * length."""
    texts = torch.tensor(list(itertools.product(range(5), repeat=length)))
    ids = torch.cat([prompt.expand(len(texts), -1), texts], dim=-1)
    logits = model(ids).logits[:, len(prompt) - 1 : -1].float()
    logits[..., 5] = -torch.inf
    ordered, order = (logits / temperature).sort(-1, descending=True)
    ordered[..., top_k:] = -torch.inf
    probs = ordered.softmax(-1)
    # A token is kept as long as those before it do not reach `top_p`.
    probs = probs.where(probs.cumsum(-1) - probs < top_p, 0.0)
    probs = torch.zeros_like(probs).scatter(-1, order, probs / probs.sum(-1, keepdim=True))
    return probs.gather(-1, texts[..., None]).prod(1).view((5,) * length)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"mars_draft_length": 2, "prompt_lookup_num_tokens": 3},
        {"mars_draft_length": 3, "prompt_lookup_num_tokens": 2, "mars_draft_choices": 2, "mars_tree_budget": 12},
    ],
)
def test_sampling_follows_the_ar_distribution_exactly(kwargs):
    model = five_token_model()
    prompt = torch.tensor([3, 4, 0, 3, 4, 1, 3])
    warp = {"temperature": 0.7, "top_k": 4, "top_p": 0.95}
    torch.manual_seed(0)
    output = lossless(
        model,
        # With a mask of its own: the prompt has the id of the padding.
        {"input_ids": prompt.expand(20_000, -1), "attention_mask": torch.ones(20_000, len(prompt), dtype=torch.long)},
        do_sample=True,
        max_new_tokens=4,
        eos_token_id=None,
        **warp,
        **kwargs,
    )
    assert output.tokens_per_forward.mean() > 1.2
    exact = exact_distribution(model, prompt, 4, **warp)
    drawn = torch.zeros(5, 5, 5, 5)
    drawn.index_put_(tuple(output.sequences[:, len(prompt) :].T), torch.tensor(1 / 20_000), accumulate=True)
    assert exact.sum() == pytest.approx(1.0, abs=1e-4)
    for first in range(3):
        others = [axis for axis in range(4) if axis not in (first, first + 1)]
        for axes in (others, [*others, first]):
            distance = 0.5 * (drawn.sum(axes) - exact.sum(axes)).abs().sum()
            assert distance < 0.02, (first, axes)


def test_sampling_is_reproduced_by_a_seed():
    model = agreeing_model()
    inputs = left_pad(random_prompts([5, 11, 3, 8]))
    kwargs = {"do_sample": True, "prompt_lookup_num_tokens": 5, "mars_tree_budget": 12}
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(lossless(model, inputs, **kwargs).sequences)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mars_threshold": 0.9, "prompt_lookup_num_tokens": 5}, "Set `mars_lossless=True` instead of"),
        ({"mars_lossless": True, "prompt_lookup_num_tokens": 0}, "`prompt_lookup_num_tokens` must be an integer"),
        (
            {"mars_lossless": True, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 0},
            "`max_matching_ngram_size` must be an integer of at least 1",
        ),
        ({"mars_lossless": True, "max_matching_ngram_size": 2}, "has no effect without `prompt_lookup_num_tokens`"),
        ({"mars_lossless": True, "mars_tree_budget": 0}, "`mars_tree_budget` must be"),
        ({"mars_lossless": True, "mars_tree_budget": "all"}, "`mars_tree_budget` must be"),
        ({"mars_lossless": True, "mars_tree_budget": True}, "`mars_tree_budget` must be"),
        ({"mars_lossless": True, "mars_draft_choices": 0}, "`mars_draft_choices` must be an integer of at least 1"),
        ({"mars_threshold": 0.9, "mars_tree_budget": 8}, "`mars_tree_budget=8` has no effect"),
        ({"mars_threshold": 0.9, "mars_draft_choices": 2}, "`mars_draft_choices=2` has no effect"),
        ({"mars_lossless": True, "num_beams": 2}, "cannot be combined with `mars_lossless`"),
        ({"mars_lossless": True, "assistant_model": "itself"}, "`assistant_model`.* combined with `mars_lossless`"),
        ({"mars_threshold": 0.9, "assistant_model": "itself"}, "`assistant_model`.* combined with `mars_threshold`"),
    ],
)
def test_refusals(kwargs, message):
    model = tiny_model()
    if "assistant_model" in kwargs:
        kwargs = {**kwargs, "assistant_model": tiny_model()}
    with pytest.raises(ValueError, match=message):
        model.generate(**left_pad(random_prompts([6])), max_new_tokens=3, do_sample=False, **kwargs)


def test_prompt_lookup_of_the_generation_config():
    model = agreeing_model()
    inputs = left_pad(random_prompts([6, 9]))
    expected = lossless(model, inputs, prompt_lookup_num_tokens=5)
    model.generation_config.prompt_lookup_num_tokens = 5
    output = lossless(model, inputs)
    assert torch.equal(output.accepted_lengths, expected.accepted_lengths)
    # And without MARS it is what it was: the stock loop, which takes one prompt.
    alone = {key: value[1:] for key, value in inputs.items()}
    assert torch.equal(stock(model, alone), expected.sequences[1:])
