"""The block size and the phases of the blocks, as training goes on."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from test_losses import assert_same_gradients, gradients, oracle_loss
from test_sft_trainer import PROMPT, TEXT, make_trainer, train
from transformers import GenerationConfig, TrainerCallback

from mars_hf.sft_config import MarsSFTConfig, block_size_at

ALL_ROWS = {"per_device_train_batch_size": len(PROMPT), "learning_rate": 0.0}


def phases_of(batch) -> list[int]:
    return (batch["grid_ids"] % batch["block_sizes"][:, None])[:, 0].tolist()


def seen_batches(trainer) -> list[dict[str, torch.Tensor]]:
    """Every batch that the trainer computes a loss of, as training or evaluation goes on."""
    batches, compute_loss = [], trainer.compute_loss

    def record(model, inputs, *args, **kwargs):
        batches.append({"train": model.training, **inputs})
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = record
    return batches


@pytest.mark.parametrize(
    ("size", "share", "steps", "expected"),
    [
        (4, 0.0, 4, [4, 4, 4, 4]),
        (4, 0.5, 8, [2, 2, 3, 3, 4, 4, 4, 4]),
        (5, 0.9, 10, [2, 2, 2, 3, 3, 3, 4, 4, 4, 5]),
        (2, 0.5, 4, [2, 2, 2, 2]),
        (32, 0.5, 4, [2, 17, 32, 32]),
        (8, 0.001, 4, [2, 8, 8, 8]),
    ],
)
def test_block_size_grows_over_its_share_of_the_steps(tmp_path, size, share, steps, expected):
    args = MarsSFTConfig(str(tmp_path), bf16=False, mars_block_size=size, mars_block_curriculum=share)
    assert [block_size_at(args, step, steps) for step in range(steps)] == expected


def test_curriculum_reaches_the_block_size_and_records_it(tmp_path):
    options = {"mars_block_size": 4, "mars_block_curriculum": 0.5, "max_steps": 4, **ALL_ROWS}
    trainer = make_trainer(tmp_path, **options, eval_dataset=Dataset.from_list(PROMPT))
    batches = seen_batches(trainer)
    sizes = []

    class Evaluate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            sizes.append(trainer.model.generation_config.mars_block_size)
            control.should_evaluate = True

    trainer.add_callback(Evaluate())
    _, logs = train(trainer)
    assert [batch["block_sizes"][0] for batch in batches if batch["train"]] == [2, 3, 4, 4]
    assert {int(batch["block_sizes"][0]) for batch in batches if not batch["train"]} == {4}
    assert [log["block_size"] for log in logs] == [2, 3, 4, 4]
    assert "mask_accuracy/depth_2" in logs[0]
    assert "mask_accuracy/depth_3" not in logs[0]
    assert "mask_accuracy/depth_4" in logs[2]
    evaluated = [log["eval_mask_loss"] for log in trainer.state.log_history if "eval_mask_loss" in log]
    assert evaluated == pytest.approx(evaluated[:1] * 4)
    trainer.save_model(tmp_path / "out")
    assert sizes == [4] * 4
    assert GenerationConfig.from_pretrained(tmp_path / "out").mars_block_size == 4


def test_a_step_of_the_curriculum_is_training_with_that_size(tmp_path):
    options = {"mars_block_curriculum": 0.5, "max_steps": 4, **ALL_ROWS}
    _, logs = train(make_trainer(tmp_path, mars_block_size=4, **options))
    for log, size in zip(logs, (2, 3, 4, 4), strict=True):
        _, (expected, *_) = train(make_trainer(tmp_path, mars_block_size=size, max_steps=1, **ALL_ROWS))
        assert log["mask_loss"] == pytest.approx(expected["mask_loss"], rel=1e-5)
        assert log["tokens_per_forward@0.95"] == pytest.approx(expected["tokens_per_forward@0.95"])


def test_phases_are_drawn_anew_in_training_and_kept_in_evaluation(tmp_path):
    options = {
        "mars_block_size": 4,
        "mars_block_offset": "random",
        "max_steps": 6,
        "eval_strategy": "steps",
        **ALL_ROWS,
    }
    # In the order of the data, so that phases can be compared.
    options["train_sampling_strategy"] = "sequential"
    trainer = make_trainer(tmp_path, **options, eval_steps=1, eval_dataset=Dataset.from_list(PROMPT))
    batches = seen_batches(trainer)
    train(trainer)
    training = [tuple(phases_of(batch)) for batch in batches if batch["train"]]
    assert len(set(training)) > 4
    evaluation = {tuple(phases_of(batch)) for batch in batches if not batch["train"]}
    assert len(evaluation) == 1
    assert len(set(*evaluation)) > 1
    logs = [log for log in trainer.state.log_history if "eval_mask_loss" in log]
    assert len(logs) == 6
    assert (
        len({log["eval_mask_loss"] for log in logs}) == len({log["eval_tokens_per_forward@0.95"] for log in logs}) == 1
    )


@pytest.mark.parametrize("option", ["seed", "data_seed"])
def test_phases_follow_the_seed(tmp_path, option):
    options = {"mars_block_size": 4, "mars_block_offset": "random", "train_sampling_strategy": "sequential"}
    first, same, other = (
        phases_of(trainer.data_collator(list(trainer.train_dataset)))
        for trainer in (make_trainer(tmp_path, **options, **{option: seed}) for seed in (3, 3, 4))
    )
    assert first == same
    assert first != other


@pytest.mark.parametrize("size", [20, 32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_large_blocks_equal_the_definition(tmp_path, attention, size):
    options = {"mars_block_size": size, "mars_block_offset": "random", "data": [TEXT[0], TEXT[2]]}
    trainer = make_trainer(tmp_path, **options)
    trainer.model.set_attn_implementation(attention)
    model, examples = trainer.model.train(), list(trainer.train_dataset)
    batch = trainer.data_collator(examples)
    loss = trainer.compute_loss(model, dict(batch))
    actual = gradients(model, loss)
    expected = oracle_loss(model, examples, size, phases_of(batch), mask_id=trainer.processing_class.mask_token_id)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(actual, gradients(model, expected))
    trainer.log({})
    assert "mask_accuracy/depth_17" in trainer.state.log_history[-1]
