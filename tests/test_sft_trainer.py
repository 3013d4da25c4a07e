"""`MarsSFTTrainer` against `SFTTrainer`, and against the definition of MARS."""

from __future__ import annotations

import copy
import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MODELS, SMALL, make_model, make_tokenizer
from datasets import Dataset
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from test_collator import documents_of
from test_losses import assert_same_gradients, gradients, oracle_loss
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from mars_hf.baselines import BlockDiffusionConfig, BlockDiffusionTrainer
from mars_hf.collator import DataCollatorForMars
from mars_hf.loading import look_for_unused_parameters
from mars_hf.masks import PADDING, Layout, dense_mask
from mars_hf.modeling import get_mars_model
from mars_hf.sft_config import MarsSFTConfig, as_mars_config
from mars_hf.sft_trainer import MarsSFTTrainer
from mars_hf.streams import batch_layout

QUIET = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}
# One step of plain SGD moves the weights by the gradient itself.
ONE_STEP = {
    "max_steps": 1,
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}

TEXT = [{"text": text} for text in ("one and one is two", "hi", "a much longer text than the others", "two", "abcdef")]
PROMPT = [{"prompt": item["text"], "completion": f" -> {item['text'][::-1]}"} for item in TEXT]
CHAT = [
    {
        "messages": [
            {"role": "user", "content": item["prompt"]},
            {"role": "assistant", "content": item["completion"]},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": item["prompt"]},
        ]
    }
    for item in PROMPT
]
CHAT_PROMPT = [
    {
        "prompt": [{"role": "user", "content": item["prompt"]}],
        "completion": [{"role": "assistant", "content": item["completion"]}],
    }
    for item in PROMPT
]
KINDS = {
    "text": (TEXT, {}),
    "prompt": (PROMPT, {}),
    "prompt, all tokens": (PROMPT, {"completion_only_loss": False}),
    "chat": (CHAT, {}),
    "chat, assistant only": (CHAT, {"assistant_only_loss": True}),
    "chat prompt": (CHAT_PROMPT, {}),
    "cut": (PROMPT, {"max_length": 17}),
    "dft": (PROMPT, {"loss_type": "dft"}),
}


def config(tmp_path, **options):
    mars = any(name.startswith("mars_") for name in options)
    return (MarsSFTConfig if mars else SFTConfig)(output_dir=str(tmp_path), **{**QUIET, **options})


def make_trainer(tmp_path, model=None, data=PROMPT, trainer_class=MarsSFTTrainer, args=None, **options):
    """A trainer on copies, so that several can start from the same; keywords are fields of the config."""
    arguments = {name: options.pop(name) for name in ARGUMENTS if name in options}
    model = make_model() if model is None else model
    return trainer_class(
        model=model if isinstance(model, str) else copy.deepcopy(model),
        args=config(tmp_path, **options) if args is None else args,
        train_dataset=Dataset.from_list(data),
        processing_class=arguments.pop("processing_class", None) or make_tokenizer(),
        **arguments,
    )


ARGUMENTS = set(inspect.signature(SFTTrainer.__init__).parameters) - {"self", "model", "args", "train_dataset"}


def train(trainer) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights after training, and the logs."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}, logs


def assert_same_weights(actual, expected, tolerance):
    for name, weight in expected.items():
        assert (actual[name] - weight).abs().max() <= tolerance, name


# What it computes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_definition(tmp_path, kind, attention):
    data, options = KINDS[kind]
    model = make_model("llama", attention)
    trainer = make_trainer(tmp_path, model, data, mars_block_size=3, mars_mask_weight=0.6, **options)
    examples = list(trainer.train_dataset)
    model = trainer.model.train()
    batch = trainer.data_collator(examples)
    loss = trainer.compute_loss(model, batch)
    actual = gradients(model, loss)
    mask_id, loss_type = trainer.processing_class.mask_token_id, trainer.args.loss_type
    expected = oracle_loss(model, examples, 3, mask_id=mask_id, mask_weight=0.6, loss_type=loss_type)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(actual, gradients(model, expected))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_and_backend_gives_one_loss(tmp_path, name, attention):
    trainer = make_trainer(tmp_path, make_model(name, attention), mars_block_size=3)
    examples = list(trainer.train_dataset)
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
        expected = oracle_loss(trainer.model, examples, 3, mask_id=trainer.processing_class.mask_token_id)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has no backward pass on CPU")
@pytest.mark.parametrize("packed", [{}, {"packing": True, "max_length": 48}])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_flex_attention_trains_as_sdpa_does(tmp_path, name, packed):
    results = []
    for attention in ("sdpa", "flex_attention"):
        # Heads of 16, the least that the kernel takes.
        model = wide_model(name, attention)
        options = {**ONE_STEP, **packed, "use_cpu": False, "mars_block_size": 3}
        results.append(train(make_trainer(tmp_path, model, **options)))
    (expected_weights, (expected,)), (weights, (log,)) = results
    assert log["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert_same_weights(weights, expected_weights, 1e-2)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("kind", ["text", "prompt", "chat, assistant only"])
def test_without_masked_stream_it_is_sft(tmp_path, kind, loss_type):
    data, options = KINDS[kind]
    options = {
        **options,
        **ONE_STEP,
        "loss_type": loss_type,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    expected_weights, expected_logs = train(make_trainer(tmp_path, data=data, trainer_class=SFTTrainer, **options))
    trainer = make_trainer(tmp_path, data=data, mars_mask_weight=0, **options)
    weights, logs = train(trainer)
    assert_same_weights(weights, expected_weights, 1e-6)
    assert {name: logs[0][name] for name in expected_logs[0]} == pytest.approx(expected_logs[0], rel=1e-6)
    if loss_type == "nll":
        assert logs[0]["ar_loss"] > 0
    assert trainer.processing_class.mask_token is None
    assert not hasattr(trainer.model.generation_config, "mars_block_size")
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text().lower()
    assert "mars" not in card.replace(str(tmp_path).lower(), "")
    assert set(trainer.model.model_tags) == {"trl", "sft"}


def test_clean_weight_scales_sft(tmp_path):
    options = {"mars_mask_weight": 0, "data": TEXT}
    trainer = make_trainer(tmp_path, mars_ar_weight=0.25, **options)
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    other = make_trainer(tmp_path, **options)
    assert loss.item() == pytest.approx(0.25 * other.compute_loss(other.model, dict(batch)).item())


@pytest.mark.parametrize("kind", ["text", "prompt", "chat, assistant only"])
def test_accumulation_equals_one_batch(tmp_path, kind):
    data, options = KINDS[kind]
    data = data[:4]
    results = [
        train(
            make_trainer(
                tmp_path,
                data=data,
                mars_block_size=3,
                per_device_train_batch_size=4 // steps,
                gradient_accumulation_steps=steps,
                **options,
                **ONE_STEP,
            )
        )
        for steps in (1, 2, 4)
    ]
    start = dict(make_model().named_parameters())
    weights, logs = results[0]
    assert all((weights[name] - start[name]).abs().max() > 1e-4 for name in start)
    for other_weights, other_logs in results[1:]:
        assert_same_weights(other_weights, weights, 2e-6)
        assert other_logs[0]["loss"] == pytest.approx(logs[0]["loss"], rel=1e-5)
        assert other_logs[0]["num_tokens"] == logs[0]["num_tokens"]


def test_accumulation_does_not_depend_on_the_loss_of_the_model_itself(tmp_path):
    model = make_model()
    # As vision-language models say, whose own loss takes no number of targets.
    model.accepts_loss_kwargs = False
    # Rows with 3 and with some 20 targets, which a mean of means would weigh alike.
    data = [{"prompt": "a", "completion": text} for text in ("b", "c", "a longer reply than these", "d")]
    options = {"data": data, "mars_block_size": 3, **ONE_STEP}
    weights, (log,) = train(make_trainer(tmp_path, model, per_device_train_batch_size=4, **options))
    batches = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    other_weights, (other,) = train(make_trainer(tmp_path, model, **batches, **options))
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-5)
    assert_same_weights(other_weights, weights, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_the_clean_stream_are_those_of_sft(tmp_path, kind):
    data, options = KINDS[kind]
    # A zero learning rate: the two losses would lead to different second steps.
    options = {**options, "max_steps": 3, "learning_rate": 0.0, "per_device_train_batch_size": 2}
    _, expected = train(make_trainer(tmp_path, data=data, trainer_class=SFTTrainer, **options))
    _, logs = train(make_trainer(tmp_path, data=data, mars_block_size=3, **options))
    for log, sft in zip(logs, expected, strict=True):
        for name in ("entropy", "mean_token_accuracy", "num_tokens"):
            assert log[name] == pytest.approx(sft[name], rel=1e-5), name
        if kind != "dft":
            assert log["ar_loss"] == pytest.approx(sft["loss"], rel=1e-5)
            assert log["loss"] == pytest.approx(log["ar_loss"] + log["mask_loss"], rel=1e-5)
        assert 1 <= log["tokens_per_forward@0.95"] <= 3


def test_weights_of_the_streams(tmp_path):
    options = {"data": TEXT, "learning_rate": 0.0, "max_steps": 1}
    _, (both,) = train(make_trainer(tmp_path, mars_ar_weight=0.5, mars_mask_weight=2.0, **options))
    assert both["loss"] == pytest.approx(0.5 * both["ar_loss"] + 2 * both["mask_loss"], rel=1e-5)
    _, (masked,) = train(make_trainer(tmp_path, mars_ar_weight=0, **options))
    assert masked["loss"] == pytest.approx(masked["mask_loss"], rel=1e-5)


def test_pad_may_be_the_end_token(tmp_path):
    losses = []
    for pad_token in ("<|pad|>", "<|end|>", None):
        tokenizer = make_tokenizer(pad_token)
        # The default for the missing one is the end token; the mask token's id does not depend on it.
        trainer = make_trainer(tmp_path, data=TEXT, processing_class=tokenizer, mars_mask_token="<|user|>")
        embedding = trainer.model.get_input_embeddings().weight.data
        embedding[tokenizer.mask_token_id] = 0.1
        embedding[tokenizer.convert_tokens_to_ids("<|user|>")] = 0.1
        batch = trainer.data_collator(list(trainer.train_dataset))
        losses.append(trainer.compute_loss(trainer.model, batch).item())
    assert losses == pytest.approx(losses[:1] * 3)


def test_it_learns_to_fill_blocks(tmp_path):
    options = {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "max_steps": 60, "weight_decay": 0.0}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "initializer_range": 0.1}))
    _, logs = train(make_trainer(tmp_path, model, PROMPT[:2], mars_block_size=4, **options))
    assert logs[-1]["tokens_per_forward@0.95"] > 2.5
    assert logs[-1]["mask_accuracy/depth_4"] > 0.9
    assert logs[0]["tokens_per_forward@0.95"] < 1.2


# Packing

PACKED = {
    "bfd": {"packing": True, "packing_strategy": "bfd", "max_length": 48},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split", "max_length": 20},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 20},
    "padding free": {"padding_free": True, "max_length": None},
}


def documents_of_dataset(trainer):
    """The documents that a trainer sees, as plain examples."""
    return [
        document
        for example in trainer.train_dataset
        for document in documents_of({"seq_lengths": [len(example["input_ids"])], **example})
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("cut", "dft")])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_loss_and_gradients_equal_the_definition(tmp_path, packed, kind, attention):
    data, options = KINDS[kind]
    trainer = make_trainer(
        tmp_path, make_model("gemma3", attention), data, mars_block_size=3, **{**options, **PACKED[packed]}
    )
    documents = documents_of_dataset(trainer)
    assert len(documents) > len(trainer.train_dataset) or packed == "padding free"
    model = trainer.model.train()
    loss = trainer.compute_loss(model, trainer.data_collator(list(trainer.train_dataset)))
    actual = gradients(model, loss)
    expected = oracle_loss(model, documents, 3, mask_id=trainer.processing_class.mask_token_id)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(actual, gradients(model, expected))


@pytest.mark.parametrize("packed", PACKED)
def test_packed_training_equals_training_on_the_documents(tmp_path, packed):
    # All of the data in every step, once in rows of documents and once in rows of one document each.
    options = {"mars_block_size": 3, "data": CHAT, "assistant_only_loss": True, **ONE_STEP}
    trainer = make_trainer(tmp_path, per_device_train_batch_size=99, **options, **PACKED[packed])
    documents = documents_of_dataset(trainer)
    weights, (log,) = train(trainer)
    batches = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(documents)}
    expected_weights, (expected,) = train(
        make_trainer(
            tmp_path, **{**options, "data": documents, "assistant_only_loss": False, "max_length": None}, **batches
        )
    )
    assert log["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert log["num_tokens"] == expected["num_tokens"]
    assert_same_weights(weights, expected_weights, 5e-6)


@pytest.mark.parametrize("packed", ["bfd", "bfd_split", "padding free"])
def test_packed_metrics_are_those_of_sft(tmp_path, packed):
    options = {"data": PROMPT, "max_steps": 2, "learning_rate": 0.0, "per_device_train_batch_size": 2}
    _, expected = train(make_trainer(tmp_path, trainer_class=SFTTrainer, **options, **PACKED[packed]))
    _, logs = train(make_trainer(tmp_path, mars_block_size=3, **options, **PACKED[packed]))
    for log, sft in zip(logs, expected, strict=True):
        for name in ("entropy", "mean_token_accuracy", "num_tokens"):
            assert log[name] == pytest.approx(sft[name], rel=1e-5), name
        assert log["ar_loss"] == pytest.approx(sft["loss"], rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_never_see_each_other(tmp_path, attention):
    trainer = make_trainer(tmp_path, make_model("llama", attention), mars_block_size=3, **PACKED["bfd"])
    examples = list(trainer.train_dataset)
    batch = trainer.data_collator(examples)
    changed = {key: value.clone() for key, value in batch.items()}
    other = batch["document_ids"] == 1
    assert other.any()
    changed["input_ids"][other] = (changed["input_ids"][other] + 7) % 256
    hidden = []
    for inputs in (batch, changed):
        layout = batch_layout(inputs)
        with torch.no_grad():
            hidden.append(
                trainer.model.model(
                    inputs["input_ids"],
                    attention_mask=trainer._attention_mask(layout),
                    position_ids=inputs["position_ids"],
                ).last_hidden_state
            )
    assert torch.equal(hidden[0][~other], hidden[1][~other])
    assert not torch.isclose(hidden[0][other], hidden[1][other]).all()


@pytest.mark.parametrize(("packing", "eval_packing"), [(True, None), (True, False), (False, True)])
def test_packed_evaluation(tmp_path, packing, eval_packing):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {}

    options = {
        **PACKED["bfd"],
        "packing": packing,
        "eval_packing": eval_packing,
        "per_device_eval_batch_size": 99,
        "eval_dataset": {"a": Dataset.from_list(CHAT)},
        "compute_metrics": compute_metrics,
        "assistant_only_loss": True,
        "data": CHAT,
    }
    trainer = make_trainer(tmp_path, mars_block_size=3, **options)
    metrics = trainer.evaluate()
    trainer.train_dataset = trainer.eval_dataset["a"]
    documents = documents_of_dataset(trainer)
    assert (len(documents) > len(trainer.train_dataset)) == (eval_packing is not False)
    with torch.no_grad():
        expected = oracle_loss(trainer.model, documents, 3, mask_id=trainer.processing_class.mask_token_id)
    assert metrics["eval_a_loss"] == pytest.approx(expected.item(), rel=1e-5)
    # The logits are those of the documents: their loss is that of the clean stream.
    labels, logits = torch.tensor(seen[0].label_ids)[:, 1:], torch.tensor(seen[0].predictions)[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
    assert metrics["eval_ar_loss"] == pytest.approx(nll.item(), rel=1e-5)


@pytest.mark.parametrize("packed", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_stay_as_they_are(tmp_path, packed):
    trainer = make_trainer(tmp_path, mars_block_size=3, eval_dataset=Dataset.from_list(PROMPT), **PACKED[packed])
    rows = list(trainer.eval_dataset)
    assert max(len(row["seq_lengths"]) for row in rows) > 1
    expected = trainer.evaluate()["eval_loss"]
    for data in (trainer.eval_dataset, trainer.eval_dataset.to_iterable_dataset()):
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-6)
    # Rows that were packed elsewhere, without labels.
    unlabelled = trainer.eval_dataset.remove_columns("labels").to_list()
    again = make_trainer(tmp_path, mars_block_size=3, data=unlabelled, **PACKED[packed])
    assert [row["seq_lengths"] for row in again.train_dataset] == [row["seq_lengths"] for row in rows]
    assert [row["labels"] for row in again.train_dataset] == [row["input_ids"] for row in rows]


# Ways to train


def test_bfloat16_is_near_float32(tmp_path):
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        for attention in ("sdpa", "eager"):
            model = make_model("llama", attention).to(dtype)
            trainer = make_trainer(tmp_path, model, data=TEXT, mars_block_size=3)
            losses.append(
                trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset))).item()
            )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2:] == pytest.approx(losses[:1] * 2, rel=0.03)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bfloat16_autocast(tmp_path, attention):
    options = {"data": TEXT, "mars_block_size": 3, "max_steps": 1, "learning_rate": 0.0}
    _, (log,) = train(make_trainer(tmp_path, make_model("llama", attention), **options, bf16=True))
    _, (expected,) = train(make_trainer(tmp_path, make_model("llama", attention), **options))
    assert log["loss"] != expected["loss"]
    assert log["loss"] == pytest.approx(expected["loss"], rel=0.03)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(tmp_path, use_reentrant):
    options = {"mars_block_size": 3, **ONE_STEP}
    weights, (log,) = train(make_trainer(tmp_path, **options))
    other_weights, (other_log,) = train(
        make_trainer(
            tmp_path,
            **options,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )
    )
    assert other_log["loss"] == pytest.approx(log["loss"], rel=1e-6)
    assert_same_weights(other_weights, weights, 1e-6)


def test_evaluation(tmp_path):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"seen": len(prediction.label_ids)}

    results = []
    for trainer_class, mars in ((SFTTrainer, {}), (MarsSFTTrainer, {"mars_block_size": 3})):
        trainer = make_trainer(
            tmp_path,
            trainer_class=trainer_class,
            eval_dataset=Dataset.from_list(PROMPT),
            compute_metrics=compute_metrics,
            per_device_eval_batch_size=2,
            **mars,
        )
        results.append(trainer.evaluate())
    sft, mars = results
    for name in ("eval_entropy", "eval_mean_token_accuracy", "eval_seen"):
        assert mars[name] == pytest.approx(sft[name], rel=1e-5)
    assert mars["eval_ar_loss"] == pytest.approx(sft["eval_loss"], rel=0.2)  # means of batches, of rows
    assert mars["eval_mask_loss"] > 0
    assert "eval_mask_accuracy/depth_3" in mars
    assert "eval_tokens_per_forward@0.95" in mars
    torch.testing.assert_close(torch.tensor(seen[1].label_ids), torch.tensor(seen[0].label_ids))
    torch.testing.assert_close(torch.tensor(seen[1].predictions), torch.tensor(seen[0].predictions))


def test_metrics_of_the_streams_are_means_over_the_data_however_it_is_batched(tmp_path):
    options = {"mars_block_size": 3, "data": KINDS["text"][0]}
    rows = Dataset.from_list(TEXT)

    def of_streams(log):
        return {
            name: value for name, value in log.items() if any(part in name for part in ("ar_loss", "mask", "forward"))
        }

    evaluated = []
    for size in (1, 2, 5):
        trainer = make_trainer(tmp_path, eval_dataset=rows, per_device_eval_batch_size=size, **options)
        if size == 2:
            trainer.predict(trainer.eval_dataset.select([0]))
        evaluated.append(of_streams(trainer.evaluate()))
    assert len(evaluated[0]) >= 6
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    assert evaluated[2] == pytest.approx(evaluated[0], rel=1e-5)
    trained = []
    for size, steps in ((5, 1), (1, 5)):
        _, [log] = train(
            make_trainer(
                tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps, **ONE_STEP, **options
            )
        )
        trained.append(of_streams(log))
        assert log["loss"] == pytest.approx(log["ar_loss"] + log["mask_loss"], rel=1e-5)
    assert trained[1] == pytest.approx(trained[0], rel=1e-5)
    assert trained[0] == pytest.approx({k.removeprefix("eval_"): v for k, v in evaluated[0].items()}, rel=1e-5)


def test_every_target_counts_where_a_model_has_no_loss_that_shifts(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=4, n_positions=256))
    _, [log] = train(make_trainer(tmp_path, model, data=TEXT, mars_block_size=3, **ONE_STEP))
    assert log["loss"] == pytest.approx(log["ar_loss"] + log["mask_loss"], rel=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_metrics_may_ask_for_the_inputs(tmp_path, batched):
    seen = []

    def compute_metrics(prediction, compute_result=False):
        seen.append(prediction.inputs)
        return {}

    for trainer_class, mars in ((SFTTrainer, {}), (MarsSFTTrainer, {"mars_block_size": 3})):
        make_trainer(
            tmp_path,
            trainer_class=trainer_class,
            eval_dataset=Dataset.from_list(PROMPT),
            compute_metrics=compute_metrics,
            include_for_metrics=["inputs"],
            batch_eval_metrics=batched,
            per_device_eval_batch_size=5,
            **mars,
        ).evaluate()
    sft, mars = seen
    for name in ("input_ids", "attention_mask", "labels") if batched else ("ids",):
        ours, theirs = (torch.as_tensor(inputs[name] if batched else inputs) for inputs in (mars, sft))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("count", ["all", "non_padding"])
def test_tokens_seen_are_those_of_sft(tmp_path, count):
    seen = []
    for trainer_class, mars in ((SFTTrainer, {}), (MarsSFTTrainer, {"mars_block_size": 3})):
        options = {"include_num_input_tokens_seen": count, "max_steps": 1, "per_device_train_batch_size": 5, **mars}
        trainer = make_trainer(tmp_path, trainer_class=trainer_class, **options)
        trainer.train()
        seen.append(trainer.state.num_input_tokens_seen)
    assert seen[0] == seen[1] > 0


def test_evaluation_of_the_loss_only(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset={"a": Dataset.from_list(PROMPT[:2])}, mars_block_size=3)
    metrics = trainer.evaluate()
    batch = trainer.data_collator(list(trainer.eval_dataset["a"]))
    with torch.no_grad():
        assert metrics["eval_a_loss"] == pytest.approx(trainer.compute_loss(trainer.model, batch).item(), rel=1e-5)


def test_streaming_equals_the_dataset_in_memory(tmp_path):
    options = {"mars_block_size": 3, "max_steps": 2, "learning_rate": 0.0, "per_device_train_batch_size": 2}
    trainer = make_trainer(tmp_path, **options)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()  # in order, as the one below
    _, expected = train(trainer)
    args = config(tmp_path, **options)
    stream = Dataset.from_list(PROMPT).to_iterable_dataset()
    _, logs = train(MarsSFTTrainer(make_model(), args, train_dataset=stream, processing_class=make_tokenizer()))
    for log, other in zip(logs, expected, strict=True):
        assert log["loss"] == pytest.approx(other["loss"], rel=1e-6)


def test_pads_to_a_multiple(tmp_path):
    trainer = make_trainer(tmp_path, mars_block_size=3, pad_to_multiple_of=32)
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert batch["input_ids"].shape[1] % 32 == batch["labels"].shape[1] % 32 == 0
    other = make_trainer(tmp_path, mars_block_size=3)
    expected = other.compute_loss(other.model, other.data_collator(list(other.train_dataset)))
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected.item(), rel=1e-6)


def router_loss(model, batch):
    """Experts times the sum over them of (share of the choices) x (mean probability), row by row without padding."""
    layout = batch_layout(batch)
    chosen, probabilities = [], []

    def record(module, args, output):
        logits = args[0].flatten(0, -2) @ module.weight.T
        probabilities.append(logits.softmax(-1))
        chosen.append(torch.nn.functional.one_hot(logits.topk(module.top_k).indices, logits.shape[-1]))

    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in model.model.layers]
    for row in range(len(batch["input_ids"])):
        real = batch["stream_ids"][row] != PADDING
        mask = dense_mask(Layout(*(field[row : row + 1, real] for field in layout)))
        ids, positions = (batch[name][row : row + 1, real] for name in ("input_ids", "position_ids"))
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    share = torch.cat(chosen).float().mean(0).sum(0)
    return share.shape[0] * (share * torch.cat(probabilities).mean(0)).sum()


def test_router_loss_counts_the_tokens_of_both_streams(tmp_path):
    trainer = make_trainer(tmp_path, small_mixtral(), router_aux_loss_coef=0.5, mars_block_size=3)
    without = make_trainer(tmp_path, small_mixtral(), router_aux_loss_coef=0.0, mars_block_size=3)
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert (batch["stream_ids"] == PADDING).any()
    loss = trainer.compute_loss(trainer.model.train(), dict(batch))
    actual = gradients(trainer.model, loss)
    model = without.model.train()
    expected = without.compute_loss(model, dict(batch)) + 0.5 * router_loss(model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(actual, gradients(model, expected))
    assert trainer._metrics["train"]["aux_loss"] == pytest.approx([router_loss(model, batch).item()], rel=1e-5)
    assert "aux_loss" not in without._metrics["train"]


def test_router_loss_of_experts_by_another_name(tmp_path):
    # SFTTrainer fails on these: their configuration has no `num_experts`.
    torch.manual_seed(0)
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    losses = []
    for weight in (0.0, 0.5):
        trainer = make_trainer(tmp_path, model, router_aux_loss_coef=weight, mars_block_size=3)
        batch = trainer.data_collator(list(trainer.train_dataset))
        losses.append(trainer.compute_loss(trainer.model.train(), batch).item())
    (router,) = trainer._metrics["train"]["aux_loss"]
    assert losses[1] - losses[0] == pytest.approx(0.5 * router, rel=1e-3)
    assert 1 <= router < 4


def test_router_loss_is_averaged_over_accumulation(tmp_path):
    options = {"data": PROMPT[:1] * 4, "router_aux_loss_coef": 0.5, "mars_block_size": 3, **ONE_STEP}
    weights, (log,) = train(make_trainer(tmp_path, small_mixtral(), per_device_train_batch_size=4, **options))
    batches = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    other_weights, (other,) = train(make_trainer(tmp_path, small_mixtral(), **batches, **options))
    assert other["loss"] == pytest.approx(log["loss"], rel=1e-5)
    assert_same_weights(other_weights, weights, 5e-6)


def test_predictions_of_experts_for_packed_rows(tmp_path):
    predicted = []
    for options in ({"packing": True, "max_length": 64}, {}):
        trainer = make_trainer(
            tmp_path, small_mixtral(), compute_metrics=lambda _: {}, mars_block_size=3, data=TEXT[:2], **options
        )
        output = trainer.predict(trainer.train_dataset)
        logits = output.predictions if isinstance(output.predictions, np.ndarray) else output.predictions[0]
        predicted.append(sorted(logits[output.label_ids != -100].max(-1).tolist()))
    assert len(trainer.train_dataset) == 2
    # The first token of a document that is not the first of its row is no label.
    assert set(np.round(predicted[0], 3)) <= set(np.round(predicted[1], 3))


# Arguments


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ddp_looks_for_parameters_that_text_leaves_out(tmp_path, use_reentrant):
    args = config(tmp_path, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for model_config, looks in ((LlamaConfig(), None), (LlavaConfig(), None if use_reentrant else True)):
        args.ddp_find_unused_parameters = None
        look_for_unused_parameters(args, SimpleNamespace(config=model_config))
        assert args.ddp_find_unused_parameters is looks
        args.ddp_find_unused_parameters = False
        look_for_unused_parameters(args, SimpleNamespace(config=model_config))
        assert args.ddp_find_unused_parameters is False


def test_the_revision_of_a_loaded_model_is_not_that_of_the_tokenizer(tmp_path, saved, monkeypatch):
    asked = []
    load = AutoProcessor.from_pretrained
    monkeypatch.setattr(
        AutoProcessor, "from_pretrained", lambda *a, revision, **k: (asked.append(revision), load(*a, **k))[1]
    )
    args = config(tmp_path, mars_block_size=2, model_init_kwargs={"revision": "main"})
    for model, revision in ((saved, "main"), (AutoModelForCausalLM.from_pretrained(saved), None)):
        MarsSFTTrainer(model, args=args, train_dataset=Dataset.from_list(PROMPT))
        assert asked.pop() == revision


def test_lengths_of_documents_count_where_rows_are_packed(tmp_path):
    rows = [{"input_ids": list(range(5, 17)), "labels": list(range(5, 17)), "seq_lengths": [5, 7]}] * 2
    plain = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    losses = []
    for data, options in ((rows, {}), (plain, {}), (rows, {"packing": True}), (rows, {"max_length": 6})):
        trainer = make_trainer(tmp_path, data=data, mars_block_size=3, **options)
        losses.append(trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset))).item())
    assert losses[0] == losses[1]
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


def test_takes_what_sft_trainer_takes():
    ours, theirs = (inspect.signature(trainer.__init__).parameters for trainer in (MarsSFTTrainer, SFTTrainer))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_takes_plain_arguments(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), **QUIET, learning_rate=0.125, assistant_only_loss=False, max_length=77)
    args.extra = "kept"
    trainer = make_trainer(tmp_path, args=args)
    assert isinstance(trainer.args, MarsSFTConfig)
    assert (trainer.args.mars_block_size, trainer.args.mars_mask_weight) == (4, 1.0)
    assert (trainer.args.learning_rate, trainer.args.max_length, trainer.args.extra) == (0.125, 77, "kept")
    assert type(args) is SFTConfig
    assert not hasattr(args, "mars_block_size")

    class OwnConfig(SFTConfig):
        pass

    own = as_mars_config(OwnConfig(output_dir=str(tmp_path), **QUIET), "model")
    assert isinstance(own, OwnConfig)
    assert own.mars_block_offset == "fixed"
    plain = as_mars_config(TrainingArguments(output_dir=str(tmp_path), **QUIET, seed=7, hub_token="secret"), "model")
    assert isinstance(plain, MarsSFTConfig)
    assert (plain.seed, plain.hub_token, plain.learning_rate) == (7, "secret", 5e-5)
    ours = MarsSFTConfig(output_dir=str(tmp_path), **QUIET)
    assert as_mars_config(ours, "model") is ours


def test_a_stream_without_any_row_is_taken_as_by_trl(tmp_path):
    """Every prompt fills `max_length`, which only training can find out."""
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}] * 3)
    for trainer_class in (SFTTrainer, MarsSFTTrainer):
        evaluated = rows.to_iterable_dataset()
        assert make_trainer(tmp_path, trainer_class=trainer_class, eval_dataset=evaluated, max_length=2)


def test_every_pass_of_packing_has_its_processes(tmp_path, monkeypatch):
    counts, mapped = [], Dataset.map

    def spy(self, *args, num_proc=None, **kwargs):
        counts.append(num_proc)
        return mapped(self, *args, **kwargs)

    monkeypatch.setattr(Dataset, "map", spy)
    packed = {"packing": True, "packing_strategy": "wrapped", "max_length": 16, "dataset_num_proc": 2}
    make_trainer(tmp_path, mars_block_size=3, **packed)
    assert len(counts) >= 4
    assert set(counts) == {2}


def test_default_arguments(monkeypatch):
    # TRL's default is bfloat16, which needs a GPU or `use_cpu`.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    assert as_mars_config(None, "hub/model").output_dir == "model-MARS"


@pytest.fixture(params=[False])
def saved(tmp_path, request):
    """A model folder as people have them, without mask token and without a spare row; tied where asked for."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": len(tokenizer), "tie_word_embeddings": request.param}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_loads_a_path_and_saves_what_decoding_needs(tmp_path, saved, caplog):
    kwargs = {"dtype": "bfloat16", "attn_implementation": "eager"}
    args = config(tmp_path, mars_block_size=3, max_steps=1, model_init_kwargs=kwargs)
    trainer = MarsSFTTrainer(saved, args, train_dataset=Dataset.from_list(PROMPT))
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.args.model_init_kwargs == kwargs
    assert "model_init_kwargs" not in caplog.text
    trainer.train()
    trainer.save_model(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (model.generation_config.mars_block_size, model.generation_config.mars_mask_token_id) == (3, 261)
    assert tokenizer.mask_token_id == 261
    assert model.config.vocab_size == 320
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    # A second training goes on with the same mask token.
    again = make_trainer(tmp_path, str(tmp_path / "out"), processing_class=tokenizer, mars_block_size=5)
    assert again.model.generation_config.mars_mask_token_id == 261
    assert again.model.generation_config.mars_block_size == 5


def test_the_new_row_is_seeded(tmp_path, saved):
    rows = []
    for model in (saved, saved, LlamaForCausalLM.from_pretrained(saved), LlamaForCausalLM.from_pretrained(saved)):
        torch.manual_seed(len(rows))
        trainer = make_trainer(tmp_path, model, mars_block_size=3, seed=5)
        rows.append(trainer.model.get_input_embeddings().weight[261].detach())
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])


def test_records_on_a_model_made_from_a_config(tmp_path):
    trainer = make_trainer(tmp_path, mars_block_size=7)
    trainer.save_model(tmp_path / "out")
    loaded = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (loaded.mars_block_size, loaded.mars_mask_token_id) == (7, trainer.processing_class.mask_token_id)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
def test_saves_where_the_base_sets_what_it_does_not_read(tmp_path, with_adapter, saved, caplog):
    path = Path(saved, "generation_config.json")
    idle = {"temperature": 0.9, "top_p": 0.6, "output_scores": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_length": 99, **idle}))
    model = AutoModelForCausalLM.from_pretrained(saved)
    peft_config = LoraConfig(target_modules=["q_proj"]) if with_adapter else None
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "peft_config": peft_config}
    trainer = make_trainer(tmp_path / "run", model, mars_block_size=3, **options)
    assert "sets `output_scores`, `temperature`, `top_p`, which generation as it asks for does not read" in caplog.text
    trainer.train()
    trainer.save_model(tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "run" / "checkpoint-1"):
        config = GenerationConfig.from_pretrained(folder)
        config.validate(strict=True)
        assert (config.mars_block_size, config.max_length, config.temperature, config.top_p) == (3, 99, None, None)
    other = get_mars_model(AutoModelForCausalLM.from_pretrained(saved), mask_token_id=3, block_size=3)
    other.save_pretrained(tmp_path / "again")
    assert GenerationConfig.from_pretrained(tmp_path / "again").mars_block_size == 3


def test_a_generation_config_that_nothing_can_save_is_refused(tmp_path):
    model = make_model()
    model.generation_config.num_return_sequences = 2
    with pytest.raises(ValueError, match=r"could not be saved after training.*`num_return_sequences`"):
        make_trainer(tmp_path, model, mars_block_size=3)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("saved", [False, True], indirect=True, ids=["untied", "tied"])
def test_peft_trains_the_mask_row_and_survives(tmp_path, saved, use_dora, caplog):
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=use_dora)
    args = config(tmp_path, mars_block_size=3, max_steps=3, learning_rate=0.05, gradient_checkpointing=True)
    trainer = MarsSFTTrainer(saved, args, train_dataset=Dataset.from_list(PROMPT), peft_config=peft_config)
    assert "`trainable_token_indices={'embed_tokens': [261]}` is added" in caplog.text
    assert peft_config.trainable_token_indices is None
    before = trainer.model.get_base_model().get_input_embeddings().weight.detach().clone()
    trainer.train()
    trainer.model.eval()
    ids = torch.tensor([[70, 71, 261, 261, 72]])
    expected = trainer.model(ids).logits
    merged = copy.deepcopy(trainer.model).merge_and_unload()
    changed = (merged.get_input_embeddings().weight != before).any(1).nonzero().flatten()
    assert changed.tolist() == [261]
    merged.save_pretrained(tmp_path / "merged")
    trainer.save_model(tmp_path / "adapter")
    for path in ("merged", "adapter"):
        assert GenerationConfig.from_pretrained(tmp_path / path).mars_mask_token_id == 261
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ordinary = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    for other in (merged, loaded, ordinary, loaded.merge_and_unload()):
        torch.testing.assert_close(other(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert type(loaded.merge_and_unload()) is LlamaForCausalLM


def test_adapter_on_a_quantized_style_model(tmp_path):
    model = prepare_model_for_kbit_training(make_model(), use_gradient_checkpointing=False)
    trainer = make_trainer(tmp_path, model, peft_config=LoraConfig(target_modules="all-linear"), mars_block_size=3)
    _, (log, *_) = train(trainer)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert any("trainable_tokens_delta" in name for name in trained)
    assert math.isfinite(log["loss"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"embed_tokens": [261]}),
        ([3, 4], {"embed_tokens": [3, 4, 261]}),
        ({"embed_tokens": [3]}, {"embed_tokens": [3, 261]}),
        ({"model.embed_tokens": [3]}, {"model.embed_tokens": [3, 261]}),
        ({"lm_head": [3]}, {"lm_head": [3], "embed_tokens": [261]}),
    ],
)
def test_mask_row_joins_the_rows_that_are_trained(tmp_path, given, expected):
    peft_config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=copy.deepcopy(given))
    trainer = make_trainer(tmp_path, peft_config=peft_config, mars_block_size=3)
    assert trainer.model.peft_config["default"].trainable_token_indices == expected
    assert peft_config.trainable_token_indices == given


def test_peft_that_trains_the_row_is_taken(tmp_path, caplog):
    for options in (
        {"trainable_token_indices": [261]},
        {"trainable_token_indices": {"model.embed_tokens": [3, 261]}},
        {"modules_to_save": ["embed_tokens"]},
    ):
        peft_config = LoraConfig(target_modules=["q_proj"], **options)
        assert make_trainer(tmp_path, peft_config=peft_config, mars_block_size=3)
        assert make_trainer(tmp_path, get_peft_model(make_model(), peft_config), mars_block_size=3)
    for where in (["embed_tokens"], None):
        rows = TrainableTokensConfig(token_indices=[3, 261], target_modules=where)
        assert make_trainer(tmp_path, peft_config=rows, mars_block_size=3)
    trainer = make_trainer(tmp_path, trained_before(), peft_config=LoraConfig(target_modules=["q_proj"]))
    assert trainer.model.peft_config["default"].trainable_token_indices is None
    assert "is added" not in caplog.text


def test_a_mask_token_is_new_until_it_was_trained(tmp_path):
    # The memory was too small for full fine-tuning, so the same model gets an adapter.
    adapter = {"peft_config": LoraConfig(target_modules=["q_proj"]), "mars_block_size": 3, "max_steps": 1}
    rows = {"embed_tokens": [261]}
    full = make_trainer(tmp_path, mars_block_size=3).model
    frozen = copy.deepcopy(full)
    frozen.get_input_embeddings().requires_grad_(False)
    with pytest.raises(ValueError, match="embedding is frozen"):
        make_trainer(tmp_path, frozen, mars_block_size=3)
    # Decoding with it, to measure it before training say, teaches it nothing.
    told = get_mars_model(make_model(), mask_token_id=261, block_size=3)
    for untrained in (full, make_trainer(tmp_path, full, mars_block_size=3).model, told):
        trainer = make_trainer(tmp_path, untrained, **adapter)
        assert trainer.model.peft_config["default"].trainable_token_indices == rows
    # An adapter takes what it has learned along when it is unloaded.
    trainer.train()
    again = make_trainer(tmp_path, trainer.model.unload(), **adapter)
    assert again.model.peft_config["default"].trainable_token_indices == rows
    trainer = make_trainer(tmp_path, mars_block_size=3, max_steps=1)
    trainer.train()
    after = make_trainer(tmp_path, trainer.model, **adapter)
    assert after.model.peft_config["default"].trainable_token_indices is None


# Refusals

UNTRAINED = r"mask token '<\|mask\|>' \(id 261\) untrained.*"
WRAPPED = UNTRAINED + r"wrapped already.*`trainable_token_indices=\{'embed_tokens': \[261\]\}`"
REFUSED_OPTIONS = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, r"Set `label_smoothing_factor=0\.0`"),
    "mask is end": ({"mars_mask_token": "<|end|>"}, r"'<\|end\|>' is the tokenizer's `eos_token`"),
    "mask becomes end": ({"mars_mask_token": "<|user|>", "eos_token": "<|user|>"}, r"'<\|user\|>' is the tokenizer's"),
    "collator": (
        {"data_collator": DataCollatorForMars(0, mask_token_id=1, block_size=2)},
        "Leave `data_collator` unset",
    ),
    "loss function": ({"compute_loss_func": lambda *_: None}, "`compute_loss_func` needs the logits"),
    "liger": ({"use_liger_kernel": True}, r"there is none here\. Set `use_liger_kernel=False`"),
    "offloading": ({"activation_offloading": True}, r"there is none here\. Set `activation_offloading=False`"),
    "processor": ({"processing_class": object()}, "`processing_class` is a `object`. Pass a tokenizer"),
    "ia3": (
        {"peft_config": IA3Config(target_modules=["q_proj"], feedforward_modules=[])},
        UNTRAINED + r"`IA3Config` cannot .* `modules_to_save=\['embed_tokens'\]`",
    ),
    "other rows": (
        {"peft_config": TrainableTokensConfig(token_indices=[3], target_modules=["embed_tokens"])},
        UNTRAINED + "Add 261 to the `token_indices`",
    ),
    "other rows of the embedding": (
        {"peft_config": TrainableTokensConfig(token_indices=[3])},
        UNTRAINED + "Add 261 to the `token_indices`",
    ),
    "activated": (
        {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])},
        "Activated LoRA .* Use a plain `LoraConfig`",
    ),
    "prompt tuning": (
        {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
        "`PromptTuningConfig` puts virtual tokens before the text.* Use `LoraConfig`",
    ),
    "mask is a letter": ({"mars_mask_token": "a"}, r"'a' is an ordinary token: it stands for 'a' in any text"),
    "mask becomes padding": (
        {"mars_mask_token": "<|user|>", "pad_token": "<|user|>"},
        r"'<\|user\|>' is the tokenizer's",
    ),
}


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_refused_options(tmp_path, case, monkeypatch):
    options, message = REFUSED_OPTIONS[case]

    def prepare(*_):
        raise AssertionError("refused only after work on the data")

    monkeypatch.setattr(SFTTrainer, "_prepare_dataset", prepare)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **{"mars_block_size": 2, **options})


def test_an_optimizer_of_the_old_embedding_is_refused(tmp_path):
    small = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 261}))
    for model, refused in ((small, True), (make_model(), False)):
        optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
        arguments = {"train_dataset": Dataset.from_list(PROMPT), "processing_class": make_tokenizer()}
        if refused:
            with pytest.raises(
                ValueError, match=r"Call `add_mask_token\(tokenizer, model\)` before you make the optimizer"
            ):
                MarsSFTTrainer(model, config(tmp_path, mars_block_size=2), optimizers=optimizers, **arguments)
            assert model.get_input_embeddings().weight.shape[0] == 261
        else:
            assert MarsSFTTrainer(model, config(tmp_path, mars_block_size=2), optimizers=optimizers, **arguments)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_a_tied_head_beside_single_rows_is_refused(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"Set `modules_to_save=\['embed_tokens', 'lm_head'\]`"):
        make_trainer(tmp_path, make_model("qwen2"), peft_config=peft_config, mars_block_size=2)
    named = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[3, 261])
    for model, adapter in (
        (make_model("qwen2"), named),
        (get_peft_model(make_model("qwen2"), copy.deepcopy(named)), None),
    ):
        with pytest.raises(
            ValueError, match=r"Set `modules_to_save=\['embed_tokens', 'lm_head'\]`, or leave the head"
        ):
            make_trainer(tmp_path, model, peft_config=adapter, mars_block_size=2)
    torch.manual_seed(0)
    sizes = {"vocab_size": 272, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    other_name = {"trainable_token_indices": {"embed_in": [261]}, "modules_to_save": ["lm_head"]}
    adapter = LoraConfig(target_modules=["query_key_value"], **other_name)
    with pytest.raises(ValueError, match=r"Set `modules_to_save=\['embed_in', 'lm_head'\]`"):
        make_trainer(tmp_path, neox, peft_config=adapter, mars_block_size=2)
    both = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    assert make_trainer(tmp_path, make_model("qwen2"), peft_config=both, mars_block_size=2)
    assert make_trainer(tmp_path, make_model("llama"), peft_config=peft_config, mars_block_size=2)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_a_tied_head_for_the_tokens_of_a_cloned_template_is_refused(tmp_path):
    other = make_tokenizer()
    other.add_special_tokens({"eos_token": "<|stop|>"})
    other.save_pretrained(tmp_path / "other")
    options = {"data": CHAT, "chat_template_path": str(tmp_path / "other"), "mars_block_size": 2}
    peft_config = LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"trains the head as a copy.*Set `chat_template_path` to a file"):
        make_trainer(tmp_path, make_model("qwen2"), peft_config=peft_config, **options)
    assert make_trainer(tmp_path, make_model("llama"), peft_config=copy.deepcopy(peft_config), **options)
    assert make_trainer(tmp_path, make_model("qwen2"), **options)


def test_masks_without_labels_are_refused_as_in_sft(tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}]
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}, "mars_block_size": 2}
    with pytest.raises(ValueError, match="has mask columns but no 'labels'"):
        make_trainer(tmp_path, data=rows, **skip)
    trainer = make_trainer(tmp_path, data=[{"input_ids": [1, 2, 3, 4]}], **skip)
    with pytest.raises(ValueError, match="has mask columns but no 'labels'"):
        trainer.evaluate(Dataset.from_list(rows))


def test_wrapping_needs_a_length(tmp_path):
    with pytest.raises(ValueError, match=r"Packing needs the length to pack to\. Set `max_length`"):
        make_trainer(tmp_path, mars_block_size=2, packing=True, packing_strategy="wrapped", max_length=None)


def test_adapter_on_the_head_is_refused_as_in_sft(tmp_path):
    for trainer_class in (SFTTrainer, MarsSFTTrainer):
        with pytest.raises(ValueError, match="lm_head"):
            make_trainer(tmp_path, trainer_class=trainer_class, peft_config=LoraConfig(target_modules=["lm_head"]))


def test_a_refusal_leaves_the_arguments_as_they_were(tmp_path, saved):
    kwargs = {"attn_implementation": "eager"}
    args = config(tmp_path, mars_block_size=2, mars_mask_token="<|end|>", model_init_kwargs=kwargs)
    with pytest.raises(ValueError, match="is the tokenizer's `eos_token`"):
        MarsSFTTrainer(saved, args, train_dataset=Dataset.from_list(PROMPT))
    assert args.model_init_kwargs == kwargs


def test_quantization_is_set_once(tmp_path, saved):
    args = config(tmp_path, mars_block_size=2, model_init_kwargs={"quantization_config": object()})
    arguments = {"args": args, "train_dataset": Dataset.from_list(PROMPT), "quantization_config": object()}
    with pytest.raises(ValueError, match=r"set both as a trainer argument and in `model_init_kwargs`\. Set it once"):
        MarsSFTTrainer(saved, **arguments)


def test_parallel_sequences_are_refused(tmp_path):
    from accelerate import ParallelismConfig

    for sizes in ({"cp_size": 2}, {"sp_size": 2}):
        args = config(tmp_path, mars_block_size=2)
        args.parallelism_config = ParallelismConfig(**sizes)
        with pytest.raises(ValueError, match=r"context or sequence parallelism.*Set `cp_size=1` and `sp_size=1`"):
            make_trainer(tmp_path, args=args)


@pytest.mark.parametrize("trainer_class", [MarsSFTTrainer, BlockDiffusionTrainer])
def test_parallel_sequences_of_a_launcher_are_refused(tmp_path, trainer_class, monkeypatch):
    launched = SimpleNamespace(cp_enabled=True)
    monkeypatch.setattr(SFTTrainer, "__init__", lambda self, **_: setattr(self, "accelerator", self))
    monkeypatch.setattr(SFTTrainer, "parallelism_config", launched, raising=False)
    kind = BlockDiffusionConfig if trainer_class is BlockDiffusionTrainer else MarsSFTConfig
    args = kind(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="context or sequence parallelism"):
        make_trainer(tmp_path, trainer_class=trainer_class, args=args)


def wide_model(name, attention):
    config = make_model(name).config
    config.hidden_size, config.head_dim = 64, 16
    torch.manual_seed(0)
    model = type(make_model(name))(config)
    model.set_attn_implementation(attention)
    return model


def small_mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))


def trained_before():
    model = make_model()
    model.generation_config.mars_mask_token_id = 261
    return model


def with_attention(implementation):
    model = make_model()
    model.config._attn_implementation_internal = implementation
    return model


def with_layers(**config):
    model = make_model("qwen2")
    for name, value in config.items():
        setattr(model.config, name, value)
    if "attention_chunk_size" in config:
        model.config.layer_types = None
    return model


def with_frozen_embedding():
    model = make_model()
    model.get_input_embeddings().requires_grad_(False)
    return model


REFUSED_MODELS = {
    "frozen embedding": (
        with_frozen_embedding,
        r"embedding is frozen, so the mask token '<\|mask\|>' \(id 261\) would stay untrained.*requires_grad_\(True\)",
    ),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=272, d_model=16, d_kv=4, d_ff=16, num_layers=1)),
        "`t5` is an encoder-decoder",
    ),
    "positions": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=272, hidden_size=16, n_layer=1, n_head=2)),
        "needs a model that reads `position_ids`, and `BloomForCausalLM` does not",
    ),
    "alibi": (
        lambda: FalconForCausalLM(
            FalconConfig(vocab_size=272, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True)
        ),
        "needs a model that reads `position_ids`, and `FalconForCausalLM` does not",
    ),
    "linear": (lambda: with_layers(layer_types=["linear_attention", "full_attention"]), "has linear_attention layers"),
    "chunked": (lambda: with_layers(attention_chunk_size=8), "has chunked_attention layers. Use a model without them"),
    "flash": (lambda: with_attention("flash_attention_2"), "`flash_attention_2` does not"),
    "flex": (lambda: with_attention("flex_attention"), "`flex_attention` has no backward pass on CPU"),
    "peft": (lambda: get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"])), WRAPPED),
    "head of several layers": (
        lambda: BertLMHeadModel(
            BertConfig(
                vocab_size=272,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                is_decoder=True,
            )
        ),
        r"`BertLMHeadModel` does not make its logits so: it has more than these \(`cls\.predictions\.transform",
    ),
    "own masks": (
        lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=272, n_embd=16, n_layer=1, n_head=2)),
        "`openai-gpt` takes no other mask than one of padding",
    ),
    "local": (
        lambda: GPTNeoForCausalLM(
            GPTNeoConfig(
                vocab_size=272, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
            )
        ),
        "`gpt_neo` has .*local.* layers",
    ),
    "prompts of a trained model": (
        lambda: get_peft_model(trained_before(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "`PromptTuningConfig` puts virtual tokens before the text",
    ),
    "peft cannot grow": (
        lambda: get_peft_model(
            LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 261})),
            LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
        ),
        "on the base model before you wrap it",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_refused_models(tmp_path, case):
    make, message = REFUSED_MODELS[case]
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, make(), mars_block_size=2)


def test_a_frozen_embedding_that_knows_the_mask_token_is_taken(tmp_path):
    model = with_frozen_embedding()
    model.generation_config.mars_mask_token_id = 261
    assert make_trainer(tmp_path, model, mars_block_size=2)


def test_weights_are_not_loaded_for_a_refusal(tmp_path, saved):
    (tmp_path / "model" / "model.safetensors").unlink()
    args = config(tmp_path, mars_block_size=2, model_init_kwargs={"attn_implementation": "flash_attention_2"})
    with pytest.raises(ValueError, match="`flash_attention_2` does not"):
        MarsSFTTrainer(saved, args, train_dataset=Dataset.from_list(PROMPT))


def test_without_masked_stream_nothing_is_refused(tmp_path):
    options = {"mars_mask_weight": 0, "peft_config": LoraConfig(target_modules=["q_proj"]), "data": TEXT}
    assert make_trainer(tmp_path, **options, data_collator=None, eval_packing=False)
    with pytest.warns(FutureWarning, match="label_smoothing"):
        assert make_trainer(tmp_path, **options, label_smoothing_factor=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mars_block_size": 1}, "`mars_block_size` must be an integer of at least 2 .*ordinary SFT.*, got 1"),
        ({"mars_block_size": 4.0}, "got 4.0"),
        ({"mars_block_size": True}, "got True"),
        ({"mars_mask_weight": -1.0}, "`mars_mask_weight` must be a finite number"),
        ({"mars_ar_weight": float("nan")}, "`mars_ar_weight` must be a finite number"),
        ({"mars_ar_weight": float("inf")}, "got inf"),
        ({"mars_ar_weight": 0, "mars_mask_weight": 0}, "nothing would be trained"),
        ({"mars_block_offset": "half"}, "must be one of fixed, random, got 'half'"),
        ({"mars_block_curriculum": 1.0}, "`mars_block_curriculum` must be at least 0 and below 1.*got 1.0"),
        ({"mars_block_curriculum": -0.1}, "got -0.1"),
        ({"mars_block_curriculum": float("nan")}, "got nan"),
        ({"mars_block_curriculum": "0.5"}, "got '0.5'"),
        ({"mars_mask_weight": None}, "`mars_mask_weight` must be a finite number of at least 0, got None"),
        ({"mars_ar_weight": "1"}, "got '1'"),
        ({"mars_ar_weight": True}, "got True"),
        ({"mars_mask_token": ""}, "`mars_mask_token` must be the text of a token, got ''"),
        ({"mars_mask_token": 5}, "got 5"),
    ],
)
def test_config_values(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_config_survives_a_dictionary(tmp_path):
    for token in (None, "<|slot|>"):
        args = MarsSFTConfig(str(tmp_path), **QUIET, mars_mask_token=token, mars_block_size=8)
        entries = {name: value for name, value in args.to_dict().items() if name.startswith("mars_")}
        again = MarsSFTConfig(str(tmp_path), **QUIET, **entries)
        assert (again.mars_mask_token, again.mars_block_size) == (token, 8)
        assert json.loads(args.to_json_string())["mars_mask_token"] == token
