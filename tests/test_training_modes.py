"""Ways to run training that must not change what is computed, and ways to come by the data."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import CHAT_TEMPLATE, make_tokenizer, needs_recent_torch
from datasets import Dataset
from test_collator import documents_of
from test_losses import oracle_loss
from test_sft_trainer import (
    CHAT,
    ONE_STEP,
    PROMPT,
    TEXT,
    assert_same_weights,
    make_trainer,
    train,
)

MODES = {
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "selective checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
    },
    "workers": {"dataloader_num_workers": 2},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "padded": {"pad_to_multiple_of": 64},
}


# TRL 1.16 uses the name that transformers 5.24 renamed.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("mode", MODES)
def test_modes_change_nothing(tmp_path, mode):
    # All rows in one step: the order in which they come does not matter.
    options = {"mars_block_size": 3, "mars_block_offset": "random", "per_device_train_batch_size": 5, **ONE_STEP}
    weights, (log,) = train(make_trainer(tmp_path, **options))
    other_weights, (other,) = train(make_trainer(tmp_path, **options, **MODES[mode]))
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-6)
    assert_same_weights(other_weights, weights, 2e-6)


@needs_recent_torch
# Dynamo warns of its own ways while it resumes behind what it cannot compile.
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_is_the_same(tmp_path):
    # Rows of one shape that score different tokens: what is scored must not be compiled in.
    generator = torch.Generator().manual_seed(0)
    rows = []
    for start in (3, 4, 5, 3, 6, 7):
        ids = torch.randint(0, 256, (12,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * start + ids[start : start + 3] + [-100] * (9 - start)})
    options = {**ONE_STEP, "data": rows, "mars_block_size": 12, "learning_rate": 0.1, "max_steps": 6}
    options["per_device_train_batch_size"] = 1
    # Every row has its masked stream padded to the same width.
    options["pad_to_multiple_of"] = 32
    expected_weights, expected = train(make_trainer(tmp_path, **options))
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    weights, logs = train(make_trainer(tmp_path, **options, **compiled))
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in expected], rel=1e-5)
    assert_same_weights(weights, expected_weights, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloads from a GPU")
def test_activation_offloading_changes_nothing(tmp_path):
    options = {"mars_block_size": 3, "use_cpu": False, **ONE_STEP}
    weights, (log,) = train(make_trainer(tmp_path, **options))
    other_weights, (other,) = train(make_trainer(tmp_path, **options, activation_offloading=True))
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-5)
    assert_same_weights(other_weights, weights, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a GPU")
@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
def test_liger_kernels_change_nothing(tmp_path):
    options = {"mars_block_size": 3, "use_cpu": False, **ONE_STEP}
    weights, (log,) = train(make_trainer(tmp_path, **options))
    other_weights, (other,) = train(make_trainer(tmp_path, **options, use_liger_kernel=True))
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-4)
    assert_same_weights(other_weights, weights, 1e-4)


def test_neftune_adds_noise_to_training_only(tmp_path):
    options = {"mars_block_size": 3, "learning_rate": 0.0, "max_steps": 1, "per_device_train_batch_size": 5}
    _, (plain,) = train(make_trainer(tmp_path, **options))
    trainer = make_trainer(tmp_path, **options, neftune_noise_alpha=5.0)
    _, (noisy,) = train(trainer)
    assert noisy["loss"] != pytest.approx(plain["loss"], rel=1e-4)
    assert noisy["loss"] == pytest.approx(plain["loss"], rel=0.5)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(plain["loss"], rel=0.05)


# Data


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("curriculum", [0.0, 0.9])
@pytest.mark.parametrize("offset", ["fixed", "random"])
def test_resuming_in_mid_epoch_goes_on(tmp_path, offset, curriculum, workers):
    options = {
        **ONE_STEP,
        "learning_rate": 0.1,
        "optim": "adamw_torch",
        "max_steps": 6,
        "mars_block_size": 4,
        "mars_block_offset": offset,
        "mars_block_curriculum": curriculum,
        "per_device_train_batch_size": 1,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    weights, logs = train(make_trainer(tmp_path, **options))
    again = make_trainer(tmp_path, **options, dataloader_num_workers=workers)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    resumed = [log for log in again.state.log_history if "loss" in log]
    assert len(resumed) == 6
    assert [log["loss"] for log in resumed] == pytest.approx([log["loss"] for log in logs], rel=1e-5)
    assert_same_weights(dict(again.model.named_parameters()), weights, 1e-6)


def test_formatting_func_gives_the_text(tmp_path):
    losses = []
    for data, arguments in (
        (TEXT, {}),
        ([{"words": row["text"]} for row in TEXT], {"formatting_func": lambda row: row["words"]}),
    ):
        trainer = make_trainer(tmp_path, data=data, mars_block_size=3, **arguments)
        losses.append(trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset))).item())
    assert losses[0] == losses[1]


def test_tokenized_rows_need_no_preparation(tmp_path):
    trainer = make_trainer(tmp_path, data=CHAT, assistant_only_loss=True, mars_block_size=3)
    rows = list(trainer.train_dataset)
    losses = [trainer.compute_loss(trainer.model, trainer.data_collator(rows)).item()]
    for options in ({}, {"dataset_kwargs": {"skip_prepare_dataset": True}}):
        other = make_trainer(tmp_path, data=rows, mars_block_size=3, **options)
        assert list(other.train_dataset) == rows
        losses.append(other.compute_loss(other.model, other.data_collator(list(other.train_dataset))).item())
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-6)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_rows_that_are_tensors(tmp_path, kind):
    rows = [{"input_ids": list(range(5, 11)), "labels": list(range(5, 11)), "seq_lengths": [2, 4]}] * 2
    trainer = make_trainer(tmp_path, data=rows, mars_block_size=3, dataset_kwargs={"skip_prepare_dataset": True})
    plain, formatted = (trainer.data_collator(list(trainer.train_dataset.with_format(form))) for form in (None, kind))
    for name, value in plain.items():
        assert torch.equal(formatted[name], value), name


def test_several_datasets_to_evaluate_on(tmp_path):
    parts = {"short": PROMPT[:2], "long": PROMPT[2:]}
    trainer = make_trainer(
        tmp_path,
        eval_dataset={name: Dataset.from_list(rows) for name, rows in parts.items()},
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.0,
        max_steps=1,
        mars_block_size=3,
    )
    trainer.train()
    for name in parts:
        examples = list(trainer.eval_dataset[name])
        expected = oracle_loss(trainer.model, examples, 3, mask_id=trainer.processing_class.mask_token_id)
        (log,) = [log for log in trainer.state.log_history if f"eval_{name}_loss" in log]
        assert log[f"eval_{name}_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_rows_without_a_scored_token(tmp_path):
    # The second step has none at all: a zero loss that moves nothing, and numbers in the logs that are numbers.
    rows = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [5, 6, 7], "labels": [-100] * 3},
        {"input_ids": [8, 9], "labels": [8, -100]},
        {"input_ids": [7], "labels": [7]},
    ]
    options = {"mars_block_size": 3, "dataset_kwargs": {"skip_prepare_dataset": True}, **ONE_STEP}
    trainer = make_trainer(tmp_path, data=rows[1:], per_device_train_batch_size=3, **options)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    weights, (log,) = train(trainer)
    assert log["loss"] == 0
    assert all(math.isfinite(value) for value in log.values())
    assert_same_weights(weights, before, 0)
    # Beside a row that has some, they change nothing.
    together = make_trainer(tmp_path, data=rows, mars_block_size=3)
    losses = [together.compute_loss(together.model, together.data_collator(part)).item() for part in (rows[:1], rows)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("max_length", [29, 30, 31])
def test_rows_cut_in_the_middle_of_a_block(tmp_path, max_length):
    trainer = make_trainer(tmp_path, data=PROMPT, max_length=max_length, mars_block_size=4)
    examples = list(trainer.train_dataset)
    assert any(len(example["input_ids"]) == max_length for example in examples)
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
        expected = oracle_loss(trainer.model, examples, 4, mask_id=trainer.processing_class.mask_token_id)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


TOOL_TEMPLATE = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + CHAT_TEMPLATE
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "now", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("assistant_only", [False, True])
@pytest.mark.parametrize("packed", [{}, {"packing": True, "max_length": 400}])
def test_tools_and_system_turns(tmp_path, assistant_only, packed):
    turns = [
        ("system", "be brief"),
        ("user", "rain?"),
        ("assistant", "let me see"),
        ("tool", "dry"),
        ("assistant", "no"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    trainer = make_trainer(
        tmp_path,
        data=[{"messages": messages, "tools": [WEATHER]}, {"messages": messages[:3], "tools": [WEATHER]}],
        processing_class=tokenizer,
        assistant_only_loss=assistant_only,
        mars_block_size=4,
        **packed,
    )
    examples = list(trainer.train_dataset)
    documents = [
        part for example in examples for part in documents_of({"seq_lengths": [len(example["input_ids"])], **example})
    ]
    documents.sort(key=lambda document: len(document["labels"]), reverse=True)
    for document, answers in zip(documents, ("let me see<|end|>no<|end|>", "let me see<|end|>"), strict=True):
        text = tokenizer.decode(document["input_ids"])
        assert '"name": "weather"' in text
        assert "<|system|>be brief<|end|>" in text
        scored = tokenizer.decode([label for label in document["labels"] if label != -100])
        # A packed document's first token is no target.
        assert scored.removeprefix("<|system|>") == (answers if assistant_only else text.removeprefix("<|system|>"))
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
        expected = oracle_loss(trainer.model, documents, 4, mask_id=tokenizer.mask_token_id)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
