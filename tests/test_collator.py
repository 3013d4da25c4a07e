"""Batches against rows that are built one token at a time."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import make_model
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from mars_hf.collator import DataCollatorForMars
from mars_hf.masks import CLEAN, MASKED, PADDING, dense_mask
from mars_hf.packing import wrap_documents
from mars_hf.streams import batch_layout, predicts_own_block

PAD, MASK = 0, 99


def brute_force_row(ids: list[int], labels: list[int], block_size: int, phase: int = 0) -> dict[str, list[int]]:
    """The two streams of an example by the words of the contract, token by token."""

    def block(t: int) -> int:
        return (t + phase) // block_size

    targets = {t for t in range(1, len(ids)) if labels[t] != -100}
    row = {"input_ids": [], "position_ids": [], "target_ids": [], "stream_ids": [], "grid_ids": []}

    def append(t: int, token: int, stream: int) -> None:
        row["input_ids"].append(token)
        row["position_ids"].append(t)
        row["target_ids"].append(labels[t + 1] if t + 1 in targets else -100)
        row["stream_ids"].append(stream)
        row["grid_ids"].append(t + phase)

    for t, token in enumerate(ids):
        append(t, token, CLEAN)
    for t, token in enumerate(ids):
        # Needed if it, or a later token of its block, predicts a target.
        if any(later + 1 in targets and block(later) == block(t) for later in range(t, len(ids))):
            append(t, MASK if t in targets else token, MASKED)
    return row


def random_examples(seed: int, count: int = 4) -> list[dict[str, list[int]]]:
    generator = random.Random(seed)
    examples = []
    for _ in range(count):
        ids = [generator.randrange(1, 90) for _ in range(generator.randrange(1, 14))]
        density = generator.choice([0.2, 0.5, 1.0])
        labels = [token if generator.random() < density else -100 for token in ids]
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def unpadded(batch: dict[str, torch.Tensor], row: int) -> dict[str, list[int]]:
    keep = batch["stream_ids"][row] != PADDING
    return {
        key: batch[key][row][keep].tolist()
        for key in ("input_ids", "position_ids", "target_ids", "stream_ids", "grid_ids")
    }


@pytest.mark.parametrize("block_size", [2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(8))
def test_rows_equal_the_loops(block_size, seed):
    examples = random_examples(seed)
    collator = DataCollatorForMars(pad_token_id=PAD, mask_token_id=MASK, block_size=block_size, dense_mask=False)
    batch = collator(examples)
    for row, example in enumerate(examples):
        expected = brute_force_row(example["input_ids"], example["labels"], block_size)
        assert unpadded(batch, row) == expected
        length = len(expected["input_ids"])
        assert (batch["input_ids"][row, length:] == PAD).all()
        assert (batch["target_ids"][row, length:] == -100).all()
        assert (batch["stream_ids"][row, length:] == PADDING).all()
    assert batch["input_ids"].shape[1] == max(len(unpadded(batch, row)["input_ids"]) for row in range(len(examples)))


@pytest.mark.parametrize("seed", range(4))
def test_labels_are_those_of_sft(seed):
    examples = random_examples(seed)
    for multiple in (None, 8):
        batch = DataCollatorForMars(pad_token_id=PAD, mask_token_id=MASK, block_size=3, pad_to_multiple_of=multiple)(
            examples
        )
        expected = DataCollatorForLanguageModeling(pad_token_id=PAD, pad_to_multiple_of=multiple)(examples)
        assert torch.equal(batch["labels"], expected["labels"])
        width = batch["input_ids"].shape[1]
        assert width >= batch["labels"].shape[1]
        assert multiple is None or width % multiple == 0


def test_labels_default_to_the_tokens():
    collator = DataCollatorForMars(pad_token_id=PAD, mask_token_id=MASK, block_size=2, dense_mask=False)
    batch = collator([{"input_ids": [5, 6, 7]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 5, MASK]]  # position 2 predicts nothing
    assert batch["target_ids"].tolist() == [[6, 7, -100, 6, 7]]
    assert batch["labels"].tolist() == [[5, 6, 7]]


def test_an_example_without_target_has_no_masked_stream():
    collator = DataCollatorForMars(pad_token_id=PAD, mask_token_id=MASK, block_size=2, dense_mask=False)
    batch = collator([{"input_ids": [5, 6, 7], "labels": [5, -100, -100]}])  # nothing predicts the first token
    assert batch["input_ids"].tolist() == [[5, 6, 7]]
    assert (batch["target_ids"] == -100).all()


def test_random_offset_is_one_phase_per_example():
    examples = random_examples(0, count=64)
    arguments = {"pad_token_id": PAD, "mask_token_id": MASK, "block_size": 4, "dense_mask": False}
    collator = DataCollatorForMars(**arguments, block_offset="random")
    batch = collator(examples)
    phases = batch["grid_ids"][:, 0]
    assert set(phases.tolist()) == {0, 1, 2, 3}
    for row, example in enumerate(examples):
        expected = brute_force_row(example["input_ids"], example["labels"], 4, int(phases[row]))
        assert unpadded(batch, row) == expected
        # Neither the batch nor what was drawn before matters.
        assert collator([example])["grid_ids"][0, 0] == phases[row]
    other_seed = DataCollatorForMars(**arguments, block_offset="random", seed=2**32 - 1)
    assert not torch.equal(other_seed(examples)["grid_ids"][:, 0], phases)
    steps = torch.stack([collator.regrid(batch, step)["grid_ids"][:, 0] for step in range(400)])
    assert torch.equal(steps[0], phases)
    assert all(set(column.tolist()) == {0, 1, 2, 3} for column in steps.T)
    counts = steps.flatten().bincount()
    # 25600 draws: a share strays from a quarter by 0.0027.
    assert ((counts / counts.sum() - 0.25).abs() < 0.01).all()
    # Nor does a step tell what the next one draws.
    pairs = (4 * steps[:-1] + steps[1:]).flatten().bincount()
    assert ((pairs / pairs.sum() - 1 / 16).abs() < 0.006).all()


@pytest.mark.parametrize("block_offset", ["fixed", "random"])
@pytest.mark.parametrize("options", [{}, {"padding_free": True}, {"pad_to_multiple_of": 8}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_laid_out_anew_is_one_of_the_other_size(block_offset, options, packed):
    examples = random_packed(5) if packed else random_examples(5)
    arguments = {
        "pad_token_id": PAD,
        "mask_token_id": MASK,
        "block_offset": block_offset,
        "dense_mask": False,
        **options,
    }
    large, small = (DataCollatorForMars(**arguments, block_size=size) for size in (5, 2))
    expected = small(examples)
    anew = large.regrid(large(examples), step=0, block_size=2)
    assert set(anew) == set(expected)
    assert all(torch.equal(anew[key], expected[key]) for key in expected)
    back = large.regrid(large.regrid(anew, step=7), step=0)
    assert all(torch.equal(back[key], value) for key, value in large(examples).items())


def test_layout_and_own_block():
    collator = DataCollatorForMars(
        pad_token_id=PAD, mask_token_id=MASK, block_size=3, block_offset="random", dense_mask=False
    )
    batch = collator(random_examples(3, count=16))
    layout, own = batch_layout(batch), predicts_own_block(batch)
    for row in range(16):
        phase = int(batch["grid_ids"][row, 0])
        for column in (batch["stream_ids"][row] != PADDING).nonzero().flatten().tolist():
            position = int(batch["position_ids"][row, column])
            assert layout.block[row, column] == (position + phase) // 3
            assert own[row, column] == ((position + phase) // 3 == (position + 1 + phase) // 3)


def test_dense_batch_is_model_input():
    examples = random_examples(2)
    arguments = {"pad_token_id": PAD, "mask_token_id": MASK, "block_size": 3}
    batch = DataCollatorForMars(**arguments)(examples)
    layout = batch_layout(DataCollatorForMars(**arguments, dense_mask=False)(examples))
    assert torch.equal(batch["attention_mask"], dense_mask(layout))
    assert set(batch) == {"input_ids", "position_ids", "attention_mask", "target_ids", "labels"}
    targets = batch.pop("target_ids")
    del batch["labels"]
    logits = make_model()(**batch).logits
    assert logits.shape[:2] == targets.shape
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 1}, "`block_size` must be an integer of at least 2, got 1"),
        ({"block_size": 2.5}, "`block_size` must be an integer of at least 2, got 2.5"),
        ({"block_size": "4"}, "got '4'"),
        ({"mask_token_id": None}, "`mask_token_id` must be an integer of at least 0, got None"),
        ({"mask_token_id": -1}, "got -1"),
        ({"pad_to_multiple_of": 0}, "`pad_to_multiple_of` must be an integer of at least 1, got 0"),
        ({"block_offset": "half"}, "`block_offset` must be one of fixed, random, got 'half'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForMars(**{"pad_token_id": PAD, "mask_token_id": MASK, "block_size": 2, **arguments})


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "has 3 `input_ids`, and its `labels` are of 2"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [1, 1]}, "has 3 `input_ids`, and its `seq_lengths` are of 2"),
    ],
)
@pytest.mark.parametrize("padding_free", [False, True])
def test_examples_whose_parts_do_not_fit_are_refused(example, message, padding_free):
    collator = DataCollatorForMars(PAD, mask_token_id=MASK, block_size=2, padding_free=padding_free)
    with pytest.raises(ValueError, match=message):
        collator([{"input_ids": [4, 5, 6, 7]}, example])


def random_packed(seed: int, count: int = 3) -> list[dict[str, list[int]]]:
    """Examples of several documents each, as `pack_dataset` makes them."""
    packed = []
    for row in range(count):
        documents = random_examples(100 * seed + row, count=3)
        packed.append(
            {
                "input_ids": [token for document in documents for token in document["input_ids"]],
                "labels": [label for document in documents for label in document["labels"]],
                "seq_lengths": [len(document["input_ids"]) for document in documents],
            }
        )
    return packed


def documents_of(example: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    documents, start = [], 0
    for length in example["seq_lengths"]:
        part = slice(start, start + length)
        documents.append({"input_ids": example["input_ids"][part], "labels": example["labels"][part]})
        start += length
    return documents


@pytest.mark.parametrize("block_size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("block_offset", ["fixed", "random"])
def test_documents_of_a_row_are_rows_of_their_own(block_size, seed, padding_free, block_offset):
    examples = random_packed(seed)
    arguments = {"pad_token_id": PAD, "padding_free": padding_free}
    batch = DataCollatorForMars(
        **arguments, mask_token_id=MASK, block_size=block_size, block_offset=block_offset, dense_mask=False
    )(examples)
    layout = batch_layout(batch)
    rows = (
        [[document for example in examples for document in documents_of(example)]]
        if padding_free
        else [documents_of(example) for example in examples]
    )
    assert len(batch["input_ids"]) == len(rows)
    sees = dense_mask(layout)[:, 0]
    for row, documents in enumerate(rows):
        real = batch["stream_ids"][row] != PADDING
        assert real.sum() == sum(
            (real & (batch["document_ids"][row] == number)).sum() for number in range(len(documents))
        )
        for number, document in enumerate(documents):
            own = real & (batch["document_ids"][row] == number)
            grid = batch["grid_ids"][row][own]
            start, phase = int(grid[0]) // block_size * block_size, int(grid[0]) % block_size
            assert block_offset == "random" or phase == 0
            actual = {
                key: batch[key][row][own].tolist() for key in ("input_ids", "position_ids", "target_ids", "stream_ids")
            }
            actual["grid_ids"] = (grid - start).tolist()
            assert actual == brute_force_row(document["input_ids"], document["labels"], block_size, phase)
            assert not sees[row][own][:, ~own].any()
            assert not sees[row][~own][:, own].any()
            # Nor do blocks of two documents share a number: what counts within blocks relies on it.
            assert not torch.isin(layout.block[row][own], layout.block[row][real & ~own]).any()
    expected = DataCollatorForLanguageModeling(**arguments)(
        [{**example, "labels": [*example["labels"]]} for example in examples]
    )
    if not padding_free:  # TRL leaves these labels to its `padding_free`, which it sets for packed examples
        firsts = DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(
            [example["seq_lengths"] for example in examples]
        )
        for row, position in enumerate(firsts):
            expected["labels"][row, : len(position)][position == 0] = -100
    assert torch.equal(batch["labels"], expected["labels"])


def test_padding_free_puts_examples_into_one_row():
    collator = DataCollatorForMars(
        pad_token_id=PAD, mask_token_id=MASK, block_size=2, dense_mask=False, padding_free=True
    )
    batch = collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 5, MASK, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 0]]
    assert batch["target_ids"].tolist() == [[6, 7, -100, 9, -100, 6, 7, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]


@pytest.mark.parametrize("streaming", [False, True])
def test_wrapped_documents_keep_their_starts(streaming):
    dataset = Dataset.from_dict(
        {"input_ids": [[1, 2, 3, 4, 5], [6], [7, 8]], "labels": [[1, 2, 3, 4, -100], [6], [7, 8]]}
    )
    rows = list(wrap_documents(dataset.to_iterable_dataset() if streaming else dataset, 3))
    assert rows == [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [3]},
        {"input_ids": [4, 5, 6], "labels": [4, -100, 6], "seq_lengths": [2, 1]},
        {"input_ids": [7, 8], "labels": [7, 8], "seq_lengths": [2]},
    ]
