"""The baselines against their definitions: block diffusion (mask, loss, sampler) and Jacobi decoding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import SMALL, make_model, make_tokenizer
from datasets import Dataset
from decoding_models import EOS, MASK, PAD, left_pad, random_prompts, tiny_model
from transformers import AutoProcessor, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from mars_hf.baselines import (
    BlockDiffusionConfig,
    BlockDiffusionTrainer,
    DataCollatorForBlockDiffusion,
    block_diffusion_generate,
    block_diffusion_loss,
    block_diffusion_mask,
    jacobi_generate,
)

QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False, "use_cpu": True}


# Block diffusion: the mask


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5])
def test_mask_is_its_definition(block_size: int):
    for length in range(1, 11):
        mask = block_diffusion_mask(length, block_size)
        for query in range(2 * length):
            for key in range(2 * length):
                ahead, behind = query % length // block_size, key % length // block_size
                if query < length:
                    expected = key < length and behind <= ahead
                elif key < length:
                    expected = behind < ahead
                else:
                    expected = behind == ahead
                assert bool(mask[query, key]) == expected, (length, query, key)


@pytest.mark.parametrize("arguments", [(0, 2), (4, 0), (4, True), (4.0, 2)])
def test_mask_refuses_what_is_no_length(arguments: tuple):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        block_diffusion_mask(*arguments)


# Block diffusion: collator and loss


def make_collator(**overrides) -> DataCollatorForBlockDiffusion:
    return DataCollatorForBlockDiffusion(
        **{"pad_token_id": PAD, "mask_token_id": MASK, "fill_token_id": EOS, "block_size": 4, **overrides}
    )


def test_collator_masks_targets_only_and_fills_the_last_block():
    ids, labels = list(range(3, 17)), [-100] * 6 + list(range(9, 17))
    torch.manual_seed(0)
    batch = make_collator(noise_range=(1.0, 1.0))([{"input_ids": ids, "labels": labels}])
    clean = [*ids, EOS, EOS]
    # The first block has no target and is not in the noisy stream; of the second, two tokens are the prompt's.
    assert batch["input_ids"][0].tolist() == clean + [7, 8] + [MASK] * 10
    assert batch["position_ids"][0].tolist() == [*range(16), *range(4, 16)]
    assert batch["target_ids"][0].tolist() == [-100] * 18 + clean[6:]
    assert batch["labels"][0].tolist() == [-100] * 6 + clean[6:]


def test_collator_does_not_end_what_was_cut():
    batch = make_collator(max_length=6)([{"input_ids": list(range(3, 9))}])
    assert batch["labels"].tolist() == [[-100, 4, 5, 6, 7, 8]]


def test_share_of_masked_targets_is_the_noise_level():
    torch.manual_seed(0)
    batch = make_collator(block_size=8)([{"input_ids": [5] * 4000}])
    noisy = batch["stream_ids"][0] == 1
    level, masked = batch["noise_level"][0, noisy], batch["target_ids"][0, noisy] != -100
    assert level.unflatten(0, (-1, 8)).std(-1).max() < 1e-6
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = (level >= low) & (level < low + 0.25)
        assert masked[inside].float().mean().item() == pytest.approx(low + 0.125, abs=0.05)
    # What the weight 1/t is for: in expectation every target counts once.
    assert (masked / level).mean().item() == pytest.approx(1, abs=0.15)


def brute_force_loss(model, batch: dict[str, torch.Tensor], block_size: int) -> torch.Tensor:
    """The weighted sum from the definition: one forward per row, noisy block and masked token, over that block's view.

    A block sees the clean blocks before it, each in both directions, and itself, noisy.
    """
    total = torch.zeros(())
    for row in range(len(batch["input_ids"])):
        stream, position = batch["stream_ids"][row], batch["position_ids"][row]
        clean = batch["input_ids"][row][stream == 0]
        for block in sorted(set((position[stream == 1] // block_size).tolist())):
            inside = (stream == 1) & (position // block_size == block)
            text = torch.cat([clean[: block * block_size], batch["input_ids"][row][inside]])
            number = torch.arange(len(text)) // block_size
            mask = (number[None, :] <= number[:, None])[None, None]
            logits = model(text[None], attention_mask=mask, position_ids=torch.arange(len(text))[None]).logits[0]
            log_probs = logits.log_softmax(-1)
            for i, target in enumerate(batch["target_ids"][row][inside].tolist()):
                if target != -100:
                    level = batch["noise_level"][row][inside][i]
                    total = total - log_probs[block * block_size + i, target] / level
    return total / (batch["labels"] != -100).sum()


def dataset_of(lengths: list[int]) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(3, 250, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_loss_and_gradients_are_those_of_the_definition(name: str, tmp_path: Path):
    model = make_model(name)
    data = dataset_of([9, 16, 5])
    trainer = BlockDiffusionTrainer(
        model,
        BlockDiffusionConfig(str(tmp_path), block_size=3, gradient_checkpointing=False, **QUIET),
        train_dataset=data,
        processing_class=make_tokenizer(),
    )
    torch.manual_seed(3)
    batch = trainer.data_collator(list(data))
    batch["input_ids"].clamp_(max=271)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    expected = brute_force_loss(model, batch, 3)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
    for own, other in zip(gradient, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_loss_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0, 0.0]])
    masked = torch.tensor([[True, False, True, False]])
    level = torch.tensor([[0.5, 0.5, 0.25, 0.25]])
    assert block_diffusion_loss(log_probs, masked, level, 4).item() == pytest.approx((1 / 0.5 + 3 / 0.25) / 4)
    assert block_diffusion_loss(log_probs, masked & False, level, 4).item() == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A model that has learned two sentences by block diffusion, its tokenizer and the sentences' ids."""
    tokenizer, model = make_tokenizer(), make_model("llama")
    texts = ["the cat sat on the mat", "a dog ran over the hills"]
    rows = []
    for text in texts:
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        rows.append({"input_ids": ids, "labels": [-100] * 5 + ids[5:]})
    trainer = BlockDiffusionTrainer(
        model,
        BlockDiffusionConfig(
            str(tmp_path_factory.mktemp("bd")),
            block_size=4,
            max_steps=150,
            learning_rate=5e-3,
            gradient_checkpointing=False,
            per_device_train_batch_size=2,
            logging_steps=50,
            **QUIET,
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer, tokenizer, [torch.tensor(row["input_ids"]) for row in rows]


def test_training_logs_and_evaluates(trained):
    trainer, _, _ = trained
    log = [entry for entry in trainer.state.log_history if "mask_accuracy" in entry]
    assert log[-1]["mask_accuracy"] > 0.9
    assert log[-1]["loss"] < log[0]["loss"] / 2
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_a_trained_model_says_what_it_has_learned_in_fewer_forwards(trained):
    trainer, tokenizer, texts = trained
    model, mask = trainer.model.eval(), tokenizer.mask_token_id
    prompts = left_pad([text[:5] for text in texts], extra=2, pad=tokenizer.pad_token_id)
    output = block_diffusion_generate(
        model, **prompts, mask_token_id=mask, block_size=4, max_new_tokens=40, threshold=0.9
    )
    for row, text in zip(output.sequences, texts, strict=True):
        assert row[2 + 5 :].tolist()[: len(text) - 5] == text[5:].tolist()
    assert output.tokens_per_forward.min() > 1.3
    slow = block_diffusion_generate(model, **prompts, mask_token_id=mask, block_size=4, max_new_tokens=40)
    assert (slow.accepted_lengths <= 1).all()


# Block diffusion: the sampler


@torch.no_grad()
def naive_sampler(model, prompt, tau, block_size, max_new, eos=EOS, mask=MASK):
    """Sampling of one prompt from the definition: no cache, no batch, the whole text each step.

    Returns the new tokens and the positions filled by each forward.
    """
    text, filled = prompt.tolist(), []
    while True:
        text += [mask] * (-len(text) % block_size or block_size)
        number = torch.arange(len(text)) // block_size
        attention = (number[None, :] <= number[:, None])[None, None]
        start = len(text) - block_size
        while mask in text[start:]:
            logits = model(torch.tensor([text]), attention_mask=attention).logits[0, start:].float()
            best = {}
            for i in range(block_size):
                if text[start + i] == mask:
                    probs = logits[i].softmax(-1)
                    token = logits[i].index_fill(0, torch.tensor(mask), -torch.inf).argmax().item()
                    best[i] = (probs[token].item(), token)
            surest = max(best, key=lambda i: best[i][0])
            taken = [i for i in best if i == surest or (tau < 1 and best[i][0] >= tau)]
            for i in taken:
                text[start + i] = best[i][1]
            filled.append(len(taken))
        reply = text[len(prompt) :]
        if eos in reply or len(reply) >= max_new:
            end = reply.index(eos) + 1 if eos in reply else max_new
            return reply[: min(end, max_new)], filled


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt2"])
@pytest.mark.parametrize(("tau", "block_size"), [(1.0, 4), (0.3, 4), (0.05, 3), (1e-6, 5), (0.2, 1)])
def test_sampler_is_the_naive_loop(family: str, tau: float, block_size: int):
    # The window of the naive loop's mask is wide enough for all families.
    overrides = {"sliding_window": None} if family == "mistral" else {}
    model = tiny_model(family, seed=1, **overrides)
    prompts = random_prompts([5, 1, 8, 11], seed=2)
    output = block_diffusion_generate(
        model,
        **left_pad(prompts, extra=1),
        mask_token_id=MASK,
        block_size=block_size,
        max_new_tokens=13,
        threshold=tau,
    )
    taken = []
    for row, prompt in enumerate(prompts):
        tokens, filled = naive_sampler(model, prompt, tau, block_size, 13)
        reply = output.sequences[row, 12:].tolist()
        assert reply[: len(tokens)] == tokens
        assert all(token == PAD for token in reply[len(tokens) :])
        # Rows wait for each other at the end of a block, so steps without progress lie between.
        own = [count for count in output.accepted_lengths[row].tolist() if count]
        assert own == filled
        assert output.tokens_per_forward[row].item() == pytest.approx(len(tokens) / len(filled))
        taken += filled
    if tau < 0.01:
        assert sum(taken) / len(taken) > 1.5


def test_sampler_bans_the_mask_token_and_cuts_at_the_limit():
    model = tiny_model(seed=3, tie_word_embeddings=True)
    output = block_diffusion_generate(
        model,
        torch.tensor([[5, 6, 7]]),
        mask_token_id=MASK,
        block_size=4,
        max_new_tokens=6,
        threshold=0.5,
        eos_token_id=[],
    )
    assert output.sequences.shape == (1, 9)
    assert MASK not in output.sequences


def test_sampler_stays_within_the_positions_that_a_model_has():
    # The shorter prompt begins in a block before, and goes on when the longer one's last block is full.
    prompts = left_pad(random_prompts([7, 8], seed=2))
    options = {"mask_token_id": MASK, "block_size": 4, "max_new_tokens": 4, "eos_token_id": []}
    outputs = [
        block_diffusion_generate(tiny_model("gpt2", seed=1, n_positions=limit), **prompts, **options).sequences.shape
        for limit in (12, 64)
    ]
    assert outputs == [(2, 12)] * 2
    # The last block is filled to its end.
    with pytest.raises(ValueError, match=r"take 12 positions, and the model has 11"):
        block_diffusion_generate(tiny_model("gpt2", n_positions=11), **prompts, **{**options, "max_new_tokens": 3})


BAD = {
    "max_new_tokens": {"max_new_tokens": 0},
    "block_size": {"block_size": 0},
    "threshold": {"threshold": 0.0},
    "attention_mask": {"attention_mask": torch.ones(1, 2)},
    "left": {"attention_mask": torch.tensor([[1, 1, 0]])},
    "positions": {"max_new_tokens": 999},
    "neither empty": {"input_ids": torch.zeros(1, 0, dtype=torch.long)},
    r"`threshold` must be in": {"threshold": "0.9"},
    "an id from 0 to 60, got 61": {"mask_token_id": 61},
    "an id from 0 to 60, got None": {"mask_token_id": None},
    "no text would end": {"mask_token_id": EOS},
    "The prompts hold": {"mask_token_id": 7},
}


@pytest.mark.parametrize("message", BAD)
def test_sampler_refuses(message: str):
    good = {"input_ids": torch.tensor([[5, 6, 7]]), "mask_token_id": MASK, "block_size": 4, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=message):
        block_diffusion_generate(tiny_model(), **{**good, **BAD[message]})


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("block_size", {"block_size": 0}),
        ("noise_low", {"noise_low": 0.0}),
        ("noise_low", {"noise_low": 0.5, "noise_high": 0.4}),
        ("packing", {"packing": True}),
        ("padding_free", {"padding_free": True}),
        ("loss_type", {"loss_type": "dft"}),
    ],
)
def test_config_refuses(message: str, options: dict, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        BlockDiffusionConfig(str(tmp_path), **QUIET, **options)


def test_trainer_refuses(tmp_path: Path):
    args = BlockDiffusionConfig(str(tmp_path), **QUIET)
    for name, value in (("peft_config", object()), ("compute_metrics", print), ("compute_loss_func", print)):
        with pytest.raises(ValueError, match=name):
            BlockDiffusionTrainer(make_model(), args, processing_class=make_tokenizer(), **{name: value})
    with pytest.raises(ValueError, match="BlockDiffusionConfig"):
        BlockDiffusionTrainer(make_model(), None, processing_class=make_tokenizer())


def test_an_optimizer_of_the_old_embedding_is_refused(tmp_path: Path):
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 261}))
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ValueError, match=r"before you make the optimizer"):
        BlockDiffusionTrainer(
            model,
            BlockDiffusionConfig(str(tmp_path), **QUIET),
            train_dataset=dataset_of([9]),
            processing_class=make_tokenizer(),
            optimizers=optimizers,
        )
    assert model.get_input_embeddings().weight.shape[0] == 261


def test_blocks_are_filled_with_the_end_token_of_the_arguments(tmp_path: Path):
    tokenizer = make_tokenizer()
    trainer = BlockDiffusionTrainer(
        make_model(),
        BlockDiffusionConfig(str(tmp_path), eos_token="<|user|>", **QUIET),
        train_dataset=dataset_of([9]),
        processing_class=tokenizer,
    )
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    batch = trainer.data_collator([{"input_ids": [1, 2, 3, 4, 5]}])
    assert batch["labels"][0].tolist() == [-100, 2, 3, 4, 5, end, end, end]


def test_a_path_is_loaded_by_the_rules_of_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    make_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    revisions, load = [], AutoProcessor.from_pretrained

    def from_pretrained(path, **options):
        revisions.append(options.get("revision"))
        return load(path, **options)

    monkeypatch.setattr(AutoProcessor, "from_pretrained", from_pretrained)
    kwargs = {"attn_implementation": "eager", "revision": "v2"}
    args = BlockDiffusionConfig(str(tmp_path / "out"), model_init_kwargs=kwargs, **QUIET)
    trainer = BlockDiffusionTrainer(str(tmp_path / "model"), args, train_dataset=dataset_of([9]))
    assert trainer.model.dtype == torch.float32
    assert trainer.model.config._attn_implementation == "eager"
    assert revisions == ["v2"]
    assert args.model_init_kwargs == kwargs
    assert "model_init_kwargs" not in caplog.text


def test_router_loss_counts_the_tokens_of_both_streams(tmp_path: Path):
    sizes = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    losses = {}
    for coefficient in (0.0, 0.5):
        torch.manual_seed(0)
        trainer = BlockDiffusionTrainer(
            MixtralForCausalLM(sizes),
            BlockDiffusionConfig(str(tmp_path), router_aux_loss_coef=coefficient, **QUIET),
            train_dataset=dataset_of([9, 16]),
            processing_class=make_tokenizer(),
        )
        torch.manual_seed(3)
        batch = trainer.data_collator(list(trainer.train_dataset))
        losses[coefficient] = trainer.compute_loss(trainer.model, dict(batch)).item()
    # Experts times the sum over them of (share of the choices) x (mean probability), over all that is not padding.
    chosen, probabilities = [], []

    def record(module, args, output):
        logits = args[0].flatten(0, -2) @ module.weight.T
        probabilities.append(logits.softmax(-1))
        chosen.append(torch.nn.functional.one_hot(logits.topk(2).indices, 4))

    for layer in trainer.model.model.layers:
        layer.mlp.gate.register_forward_hook(record)
    for row, stream in enumerate(batch["stream_ids"]):
        real = stream != -1
        block = batch["position_ids"][row, real] // 4
        noisy = stream[real] == 1
        same, before = block[:, None] == block, block[None] < block[:, None]
        allowed = torch.where(noisy[:, None], noisy & same | ~noisy & before, ~noisy & (same | before))
        ids, positions = (batch[name][row, real][None] for name in ("input_ids", "position_ids"))
        trainer.model.model(ids, attention_mask=allowed[None, None], position_ids=positions, use_cache=False)
    share = torch.cat(chosen).float().mean(0).sum(0)
    expected = 4 * (share * torch.cat(probabilities).mean(0)).sum().item()
    assert losses[0.5] - losses[0.0] == pytest.approx(0.5 * expected, rel=1e-4)


# Jacobi decoding


def greedy(model, prompts: dict[str, torch.Tensor], max_new_tokens: int) -> torch.Tensor:
    return model.generate(**prompts, max_new_tokens=max_new_tokens, do_sample=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3_text", "gpt_neox", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_jacobi_is_greedy_decoding(family: str, window: int):
    model = tiny_model(family, seed=1)
    prompts = left_pad(random_prompts([6, 1, 9, 4], seed=2), extra=1)
    output = jacobi_generate(model, **prompts, max_new_tokens=24, window=window)
    expected = greedy(model, prompts, 24)
    assert output.sequences.tolist() == expected.tolist()
    steps = expected.shape[1] - prompts["input_ids"].shape[1]
    assert output.num_forwards <= steps
    assert (output.tokens_per_forward >= 1).all()
    if window == 1:
        assert output.num_forwards == steps


def test_jacobi_counts_the_forwards_that_the_model_sees_and_needs_fewer():
    """A model that repeats its last token: the first guesses are right wherever the text is a run."""
    model = tiny_model(seed=1)
    prompts = left_pad(random_prompts([4, 7], seed=5))
    calls = []
    hook = model.register_forward_hook(lambda *args: calls.append(1))
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    with torch.no_grad():
        head.copy_(embedding)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    output = jacobi_generate(model, **prompts, max_new_tokens=20, window=8)
    hook.remove()
    assert output.num_forwards == len(calls)
    assert output.sequences.tolist() == greedy(model, prompts, 20).tolist()
    assert output.num_forwards <= 4
    assert output.tokens_per_forward.min() > 4


def test_jacobi_keeps_right_guesses_behind_wrong_ones():
    """A model that goes by the position more than by the tokens: guesses come true after a forward or two."""
    model = tiny_model("gpt2", seed=1)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(0.1)
    prompts = left_pad(random_prompts([4, 7, 2], seed=5))
    output = jacobi_generate(model, **prompts, max_new_tokens=24, window=6)
    expected = greedy(model, prompts, 24)
    assert output.sequences.tolist() == expected.tolist()
    assert len(set(expected[0, 7:].tolist())) > 8
    assert output.num_forwards < 0.8 * (expected.shape[1] - 7)
    assert {1, 2} < set(output.accepted_lengths.flatten().tolist())


def test_jacobi_row_does_not_depend_on_its_batch():
    model = tiny_model(seed=4)
    prompts = random_prompts([3, 8, 5], seed=6)
    together = jacobi_generate(model, **left_pad(prompts), max_new_tokens=18, window=6)
    for row, prompt in enumerate(prompts):
        alone = jacobi_generate(model, prompt[None], max_new_tokens=18, window=6)
        tokens = alone.sequences[0, len(prompt) :].tolist()
        assert together.sequences[row, 8:].tolist()[: len(tokens)] == tokens


@pytest.mark.parametrize("options", [{"window": 0}, {"window": True}, {"max_new_tokens": 0}])
def test_jacobi_refuses(options: dict):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        jacobi_generate(tiny_model(), torch.tensor([[5]]), **{"max_new_tokens": 3, **options})


def test_ids_of_32_bits_are_ids():
    model, inputs = tiny_model(), left_pad(random_prompts([5, 3]), pad=MASK)
    narrow = {**inputs, "input_ids": inputs["input_ids"].int()}
    samplers = [
        lambda **prompts: jacobi_generate(model, **prompts, max_new_tokens=6),
        lambda **prompts: block_diffusion_generate(
            model, **prompts, mask_token_id=MASK, block_size=4, max_new_tokens=6
        ),
    ]
    for sample in samplers:
        assert torch.equal(sample(**narrow).sequences, sample(**inputs).sequences)


def test_without_end_token_rows_run_to_the_limit():
    output = jacobi_generate(tiny_model(), torch.tensor([[5, 6]]), max_new_tokens=7, eos_token_id=[])
    assert output.sequences.shape == (1, 9)
