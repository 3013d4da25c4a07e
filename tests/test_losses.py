"""The loss, its gradients and the metrics against one ordinary causal forward per target, and against loops."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import MODELS, make_model
from test_collator import random_examples

from mars_hf.collator import DataCollatorForMars
from mars_hf.losses import TokenScores, count_within_block, mars_loss, stream_metrics, stream_sums
from mars_hf.masks import CLEAN, MASKED, PADDING, Layout, dense_mask, mars_attention_mask
from mars_hf.model_masks import masks_for_model
from mars_hf.streams import batch_layout, predicts_own_block

PAD, MASK = 0, 99


def make_batch(examples, block_size=3, block_offset="fixed"):
    return DataCollatorForMars(
        pad_token_id=PAD, mask_token_id=MASK, block_size=block_size, block_offset=block_offset, dense_mask=False
    )(examples)


def two_stream_log_probs(model, batch, block_size):
    """(N, T): log-probability of each position's target, zero where none, from the model's own logits."""
    layout = batch_layout(batch)
    mask = masks_for_model(model.config, model.dtype, lambda window: dense_mask(layout, window))
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"], use_cache=False).logits
    targets = batch["target_ids"]
    chosen = logits.float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return chosen.masked_fill(targets == -100, 0)


def oracle_loss(
    model, examples, block_size, phases=None, mask_id=MASK, mask_weight=1.0, ar_weight=1.0, loss_type="nll"
):
    """MARS by its definition: an ordinary causal forward per target, over [clean prefix | block up to the [MASK]]."""
    losses, num_targets = [], 0
    for example, phase in zip(examples, phases or [0] * len(examples), strict=True):
        ids, labels = example["input_ids"], example["labels"]
        targets = [t for t in range(1, len(ids)) if labels[t] != -100]
        num_targets += len(targets)
        for t in targets:
            start = max(0, (t - 1 + phase) // block_size * block_size - phase)
            block = [mask_id if s in targets else ids[s] for s in range(start, t)]
            for weight, context in ((ar_weight, ids[:t]), (mask_weight, ids[:start] + block)):
                logits = model(torch.tensor([context]), use_cache=False).logits[0, -1]
                log_prob = logits.log_softmax(-1)[labels[t]]
                scale = log_prob.detach().exp() if loss_type == "dft" else 1.0
                losses.append(-weight * scale * log_prob)
    return sum(losses) / num_targets


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(actual, expected, tolerance=2e-5):
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_one_forward_per_target(name, attention):
    model = make_model(name, attention)
    examples = random_examples(5, count=3)
    weights = {"mask_weight": 0.7, "ar_weight": 1.3}
    expected = oracle_loss(model, examples, 3, **weights)
    expected_gradients = gradients(model, expected)
    batch = make_batch(examples)
    assert (batch["stream_ids"] == PADDING).any()
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    loss = mars_loss(two_stream_log_probs(model, batch, 3), batch["stream_ids"], num_targets, **weights)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(model, loss), expected_gradients)


def test_random_offset_and_dft_equal_one_forward_per_target(model):
    examples = random_examples(6, count=4)
    batch = make_batch(examples, 4, "random")
    phases = batch["grid_ids"][:, 0].tolist()
    assert len(set(phases)) > 1
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    loss = mars_loss(two_stream_log_probs(model, batch, 4), batch["stream_ids"], num_targets, loss_type="dft")
    expected = oracle_loss(model, examples, 4, phases, loss_type="dft")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected_gradients = gradients(model, expected)
    assert_same_gradients(gradients(model, loss), expected_gradients)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_short_form_equals_the_full_form(name):
    model, block_size = make_model(name), 4
    for example in random_examples(7, count=6):
        ids, labels = torch.tensor(example["input_ids"]), torch.tensor(example["labels"])
        length = len(ids)
        is_target = (labels != -100) & (torch.arange(length) > 0)
        if not is_target.any():
            continue
        # The paper's form: both streams whole, and its mask; windows are cut out of it.
        both = torch.cat([ids, ids.masked_fill(is_target, MASK)])[None]
        positions = torch.arange(length).repeat(2)[None]

        def full_mask(window, positions=positions, length=length):
            near = positions[0][:, None] - positions[0] < (window or math.inf)
            return (mars_attention_mask(length, block_size) & near)[None, None]

        masks = masks_for_model(model.config, torch.float32, full_mask)
        log_probs = model(both, attention_mask=masks, position_ids=positions).logits[0].log_softmax(-1)
        targets = is_target.nonzero().flatten()
        expected = -sum(log_probs[start + targets - 1, labels[targets]].sum() for start in (0, length)) / len(targets)
        batch = make_batch([example], block_size)
        loss = mars_loss(two_stream_log_probs(model, batch, block_size), batch["stream_ids"], len(targets))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_clean_stream_is_the_ordinary_model(name, attention):
    model = make_model(name, attention)
    examples = random_examples(8, count=3)
    batch = make_batch(examples)
    layout = batch_layout(batch)
    mask = masks_for_model(model.config, model.dtype, lambda window: dense_mask(layout, window))
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"]).logits
        for row, example in enumerate(examples):
            expected = model(torch.tensor([example["input_ids"]])).logits[0]
            torch.testing.assert_close(logits[row, : len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_masked_blocks_do_not_see_their_own_clean_tokens(name):
    model, block_size, length = make_model(name), 3, 11
    example = {"input_ids": list(range(10, 10 + length)), "labels": list(range(10, 10 + length))}
    batch = make_batch([example], block_size)
    layout = batch_layout(batch)
    masks = masks_for_model(model.config, model.dtype, lambda window: dense_mask(layout, window))
    with torch.no_grad():
        before = model(batch["input_ids"], attention_mask=masks, position_ids=batch["position_ids"]).logits[0]
        for changed in range(length):
            ids = batch["input_ids"].clone()
            ids[0, changed] = 200
            after = model(ids, attention_mask=masks, position_ids=batch["position_ids"]).logits[0]
            masked = layout.stream[0] == MASKED
            blind = masked & (layout.block[0] <= changed // block_size)
            assert torch.equal(after[blind], before[blind])
            later = masked & (layout.block[0] == changed // block_size + 1)
            assert (after[later] != before[later]).any(-1).all()


def test_no_target_gives_a_differentiable_zero(model):
    batch = make_batch([{"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    loss = mars_loss(two_stream_log_probs(model, batch, 3), batch["stream_ids"], 0)
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters())


def test_count_within_block():
    stream = torch.tensor([[CLEAN, CLEAN, CLEAN, CLEAN, MASKED, MASKED, MASKED, MASKED, PADDING]])
    block = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 0]])
    flag = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]]).bool()
    counted = count_within_block(flag, Layout(stream, block, block, torch.zeros_like(block)))
    assert counted.tolist() == [[1, 2, 1, 2, 0, 1, 1, 2, 1]]


def random_scores(batch, seed) -> TokenScores:
    """Scores as a model half trained would give: many certain and right, many not."""
    generator = torch.Generator().manual_seed(seed)
    has_target = batch["target_ids"] != -100
    sure = torch.rand(has_target.shape, generator=generator) < 0.6
    probs = torch.where(sure, 0.96, 0.9)
    top1 = torch.rand(has_target.shape, generator=generator) < 0.8
    entropy = torch.rand(has_target.shape, generator=generator)
    return TokenScores(probs.log() * has_target, entropy * has_target, top1 & has_target, has_target)


def loop_metrics(examples, phases, batch, scores, block_size):
    """What `stream_metrics` says it computes, target by target."""
    nll = {CLEAN: [], MASKED: []}
    correct, by_depth, runs = [], {k: [] for k in range(1, block_size + 1)}, []
    for row, (example, phase) in enumerate(zip(examples, phases, strict=True)):
        labels = example["labels"]
        targets = [t for t in range(1, len(labels)) if labels[t] != -100]
        column = {
            (int(batch["stream_ids"][row, c]), int(batch["position_ids"][row, c])): c
            for c in range(batch["stream_ids"].shape[1])
        }
        for t in targets:
            clean, masked = column[CLEAN, t - 1], column[MASKED, t - 1]
            nll[CLEAN].append(-scores.log_probs[row, clean].item())
            nll[MASKED].append(-scores.log_probs[row, masked].item())
            correct.append(bool(scores.is_top1[row, masked]))
            depth = sum(s in targets and (s + phase) // block_size == (t - 1 + phase) // block_size for s in range(t))
            if depth > 0:
                by_depth[depth].append(correct[-1])
        for block in range((len(labels) + phase) // block_size + 1):
            members = [t for t in targets if (t + phase) // block_size == block and (t + phase) % block_size > 0]
            members = [t for t in members if t > 0]
            if not members:
                continue
            run = 0
            for t in members:
                c = column[MASKED, t - 1]
                if not (scores.is_top1[row, c] and scores.log_probs[row, c].exp() >= 0.95):
                    break
                run += 1
            runs.append(1 + run)
    metrics = {
        "ar_loss": sum(nll[CLEAN]) / len(correct),
        "mask_loss": sum(nll[MASKED]) / len(correct),
        "mask_accuracy": sum(correct) / len(correct),
        "tokens_per_forward@0.95": sum(runs) / len(runs),
    }
    return metrics | {f"mask_accuracy/depth_{k}": sum(hits) / len(hits) for k, hits in by_depth.items() if hits}


@pytest.mark.parametrize("block_offset", ["fixed", "random"])
@pytest.mark.parametrize("block_size", [2, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_the_loops(seed, block_size, block_offset):
    examples = random_examples(seed, count=8)
    batch = make_batch(examples, block_size, block_offset)
    scores = random_scores(batch, seed)
    sums = stream_sums(
        scores,
        batch_layout(batch),
        batch["input_ids"] == MASK,
        predicts_own_block(batch),
        block_size,
    )
    metrics = stream_metrics({name: value.item() for name, value in sums.items()}, block_size)
    expected = loop_metrics(examples, batch["grid_ids"][:, 0].tolist(), batch, scores, block_size)
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert 1 < metrics["tokens_per_forward@0.95"] <= block_size
    assert sums["tokens"] == sum(len(example["input_ids"]) for example in examples)
    assert sums["targets"] == (batch["labels"][:, 1:] != -100).sum()


def test_a_mean_over_nothing_is_left_out():
    batch = make_batch([{"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    sums = stream_sums(
        random_scores(batch, 0), batch_layout(batch), batch["input_ids"] == MASK, predicts_own_block(batch), 3
    )
    assert stream_metrics({name: value.item() for name, value in sums.items()}, 3) == {}
