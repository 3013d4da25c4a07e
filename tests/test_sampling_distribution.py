"""20,000 draws: given the text before a step, its first token follows the model's own next-token distribution."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mars_hf import get_mars_model

DRAWS, TEXT_TOKENS, MASK = 20_000, 5, 5
# Chi-square with four degrees of freedom: 27 is exceeded once in 50,000 times.
LARGEST = 27.0


def five_token_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TEXT_TOKENS + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=None, eos_token_id=None, pad_token_id=0)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return get_mars_model(model, mask_token_id=MASK)


@torch.no_grad()
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_first_token_of_every_step_follows_the_ar_distribution(tau, temperature):
    model = five_token_model()
    prompts = torch.full((DRAWS, 1), 3)
    torch.manual_seed(1)
    output = model.generate(
        prompts, mars_threshold=tau, mars_block_size=3 if tau < 1 else None, max_new_tokens=4, do_sample=True, top_k=0,
        temperature=temperature, suppress_tokens=[MASK] if tau == 1 else None, return_dict_in_generate=True,
    )  # fmt: skip
    accepted = output.accepted_lengths
    assert (output.tokens_per_forward.mean() > 1.05) == (tau < 1)
    starts = accepted.cumsum(-1) - accepted
    tested = 0
    for start in range(4):
        # Rows with a step that begins behind `start` new tokens.
        rows = ((starts == start) & (accepted > 0)).any(-1)
        texts, drawn = output.sequences[rows, : start + 1], output.sequences[rows, start + 1]
        for text in texts.unique(dim=0):
            draws = drawn[(texts == text).all(-1)]
            expected = (model(text[None]).logits[0, -1, :TEXT_TOKENS] / temperature).softmax(-1) * len(draws)
            found = torch.bincount(draws, minlength=TEXT_TOKENS + 1)
            assert found[MASK] == 0
            # Tokens too rare for the approximation count as one.
            rare = expected < 5
            pairs = [*zip(found[:TEXT_TOKENS][~rare], expected[~rare], strict=True)]
            pairs.append((found[:TEXT_TOKENS][rare].sum(), expected[rare].sum()))
            if len(draws) >= 100 and len(pairs) > 2:
                tested += 1
                assert sum((count - mean) ** 2 / mean for count, mean in pairs if mean >= 5) < LARGEST
    assert tested >= 5


@torch.no_grad()
@pytest.mark.parametrize("tau", [1e-9, 0.2])
def test_two_tokens_of_a_step_follow_the_definition(tau):
    """The second one is drawn behind a [MASK], and taken if the model is sure enough of it; else AR draws one."""
    model, temperature = five_token_model(), 0.7
    prompt = torch.tensor([[3]])
    first_logits, mask_logits = model(torch.tensor([[3, MASK]])).logits[0]
    first, second = (logits[:TEXT_TOKENS].div(temperature).softmax(-1) for logits in (first_logits, mask_logits))
    behind = torch.stack(
        [model(torch.tensor([[3, token]])).logits[0, -1, :TEXT_TOKENS] for token in range(TEXT_TOKENS)]
    )
    behind = behind.div(temperature).softmax(-1)
    # The raw probability, of all tokens and without the temperature, is what is asked for.
    sure = mask_logits.softmax(-1)[:TEXT_TOKENS] >= tau
    assert sure.all() == (tau < 0.1)
    assert sure.any()
    expected = first[:, None] * (second * sure + (second * ~sure).sum() * behind)
    torch.manual_seed(2)
    output = model.generate(
        prompt.expand(DRAWS, -1), mars_threshold=tau, mars_block_size=2, max_new_tokens=2, do_sample=True, top_k=0,
        temperature=temperature, return_dict_in_generate=True,
    )  # fmt: skip
    drawn = torch.zeros(TEXT_TOKENS, TEXT_TOKENS)
    drawn.index_put_(tuple(output.sequences[:, 1:].T), torch.tensor(1 / DRAWS), accumulate=True)
    assert (drawn - expected).abs().sum() / 2 < 0.02
    accepted = (output.accepted_lengths[:, 0] == 2).float().mean()
    assert abs(accepted - (second * sure).sum()) < 0.02
