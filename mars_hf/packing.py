"""Rows of one length that hold several documents, with a record of where each starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from datasets import Dataset
from trl import SFTConfig, pack_dataset
from trl.data_utils import DatasetType, get_dataset_column_names
from trl.trainer.utils import global_then_local_main_first


def is_packed(dataset: DatasetType) -> bool:
    """Whether the rows of a dataset hold documents whose lengths are recorded."""
    return {"input_ids", "seq_lengths"} <= set(get_dataset_column_names(dataset))


def uncut(args: SFTConfig) -> SFTConfig:
    """Arguments by which `SFTTrainer` prepares a dataset but does not cut its rows, or drop those without a target."""
    args = copy.copy(args)
    args.max_length = None
    return args


def prepare_documents(
    dataset: DatasetType,
    args: SFTConfig,
    packing: bool,
    prepare: Callable[[DatasetType, SFTConfig, bool], DatasetType],
) -> DatasetType:
    """Prepare a dataset as `SFTTrainer` does, so that the documents of a packed row can be told apart.

    Args:
        args: the arguments of the training.
        packing: whether the dataset is packed.
        prepare: `SFTTrainer`'s preparation of a dataset, by the arguments given to it, packed or not.

    Raises:
        ValueError: for packing without `max_length`.
    """
    if not packing:
        # As to `SFTTrainer`, a row is one document then, whatever it was packed from. Before anything is prepared: the
        # columns of a stream are those of its first row, up to which all rows would be prepared for that.
        if not args.padding_free and "seq_lengths" in get_dataset_column_names(dataset):
            dataset = dataset.remove_columns("seq_lengths")
        return prepare(dataset, args, False)
    if is_packed(dataset):
        # What `evaluate` is given may be the trainer's own data. Only labels can be missing.
        return prepare(dataset, uncut(args), False)
    if args.packing_strategy != "wrapped":
        return prepare(dataset, args, True)
    return pack_wrapped(dataset, args, prepare)


def pack_wrapped(
    dataset: DatasetType, args: SFTConfig, prepare: Callable[[DatasetType, SFTConfig, bool], DatasetType]
) -> DatasetType:
    """Prepare and pack a dataset as TRL does by "wrapped", so that its documents can be told apart.

    TRL wraps without a record of where documents start, and they see each other.

    Args:
        args: the arguments of the training.
        prepare: as that of `prepare_documents`.

    Raises:
        ValueError: without `max_length`.
    """
    if args.max_length is None:
        raise ValueError("Packing needs the length to pack to. Set `max_length`.")
    whole = uncut(args)
    whole.shuffle_dataset = False
    dataset = prepare(dataset, whole, False).select_columns(["input_ids", "labels"])
    # As in `SFTTrainer`: before packing, so that neighbours are not related, and after.
    if args.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    with global_then_local_main_first():
        dataset = wrap_documents(dataset, args.max_length, args.dataset_num_proc)
    return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset


def wrap_documents(dataset: DatasetType, length: int, num_proc: int | None = None) -> DatasetType:
    """Cut the concatenated examples of a dataset into rows of one length, as packing of TRL's does by "wrapped".

    The rows have `seq_lengths` as well, so that the documents of a row can be told apart: a document that is cut goes
    on in the next row as another.

    Args:
        dataset: in memory or streaming, with columns that hold one list per token sequence, `input_ids` among them.
        length: the length of the rows; the last of a batch of examples may be shorter.
        num_proc: processes that share the work, for a dataset in memory.
    """
    options = {"num_proc": num_proc} if isinstance(dataset, Dataset) else {}
    dataset = dataset.map(lambda example: {"positions": list(range(len(example["input_ids"])))}, **options)
    dataset = pack_dataset(dataset, length, "wrapped", options)

    def count(example: dict[str, Any]) -> dict[str, Any]:
        starts = [i for i, position in enumerate(example["positions"]) if i == 0 or position == 0]
        return {"seq_lengths": [end - start for start, end in pairwise([*starts, len(example["positions"])])]}

    return dataset.map(count, remove_columns=["positions"], **options)
