"""What saving and pushing write besides the weights: the mask token, the `custom_generate` folder, the model card."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import GenerationConfig

from .bundle import write_bundle
from .model_card import CardFacts, add_tags, is_mars_card, keep_results, make_card

logger = logging.getLogger(__name__)

CARD = "README.md"
# What transformers writes where a repository has no card.
EMPTY_CARD = "This model card has been automatically generated."
# How transformers lists the entries that a generation config does not read.
IDLE_ENTRY = re.compile(r"^- `(\w+)`:", re.MULTILINE)
TRAINING_METRICS = ("tokens_per_forward@0.95", "mask_accuracy", "mean_token_accuracy")


class MarsCheckpointMixin:
    """`save_pretrained` and `push_to_hub` of a model, or a PEFT adapter, that has MARS generation."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save as the stock class does, with all its arguments, and write what MARS needs beside it."""
        model: Any = self
        if not _is_trained(model) or not kwargs.get("is_main_process", True):
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        base = base_model(model)
        make_savable(base.generation_config)
        # vLLM looks for the mask token there.
        base.config.mask_token_id = base.generation_config.mars_mask_token_id
        upload: dict[str, Any] | None = None
        if kwargs.pop("push_to_hub", False):
            upload = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr") if name in kwargs}
            create: dict[str, Any] = {name: kwargs.pop(name) for name in ("private", "exist_ok") if name in kwargs}
            create["token"] = upload["token"] = kwargs.get("token")
            repo_id = upload.pop("repo_id", Path(save_directory).name)
            upload["repo_id"] = HfApi().create_repo(repo_id, **{"exist_ok": True, **create}).repo_id
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        timestamps = model._get_files_timestamps(save_directory)
        had_card = Path(save_directory, CARD).is_file()
        result = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if base is not model:
            # PEFT saves no generation config, and decoding finds the block size and the mask token there.
            base.generation_config.save_pretrained(save_directory)
            if upload is not None and not had_card:
                # PEFT's empty form, in whose place `finish_card` writes one.
                Path(save_directory, CARD).unlink(missing_ok=True)
        write_bundle(save_directory)
        if upload is not None:
            model._upload_modified_files(save_directory, files_timestamps=timestamps, **upload)
        return result

    def create_or_update_model_card(self, output_dir: str) -> None:
        """PEFT's part of the card that `save_pretrained` of an adapter leaves.

        A MARS card has what PEFT would write, but for the path that the base was loaded from.
        """
        if read_card(output_dir) is None:
            super().create_or_update_model_card(output_dir)  # type: ignore[misc]

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        # Every push of a model passes here, with the card that the repository has, or an empty one.
        if _is_trained(self):
            finish_card(self, working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)  # type: ignore[misc]


def base_model(model: Any) -> Any:
    """The model itself, of a PEFT wrapper or of itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def make_savable(generation_config: GenerationConfig) -> None:
    """Reset what makes a generation config invalid and is read by no generation that it asks for, and warn.

    Many published ones set a `temperature` without `do_sample`. transformers saves these as long as nothing in them
    has changed, and MARS adds its entries.

    Raises:
        ValueError: if it stays invalid; says what to change.
    """
    try:
        generation_config.validate(strict=True)
        return
    except ValueError as error:
        idle = sorted(IDLE_ENTRY.findall(str(error)))
    defaults = GenerationConfig()
    for name in idle:
        setattr(generation_config, name, getattr(defaults, name))
    try:
        generation_config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"The model could not be saved after training, because its generation config is invalid. {error}\nChange "
            "it in `model.generation_config` first."
        ) from error
    logger.warning(
        f"The generation config sets {', '.join(f'`{name}`' for name in idle)}, which generation as it asks for does "
        "not read, and transformers would not save that. They are reset. To keep them, set what reads them in "
        "`model.generation_config` first, such as `do_sample=True`."
    )


def finish_card(model: Any, folder: str | os.PathLike[str], repo_id: str) -> None:
    """Write the model card of a folder that is about to be pushed; of a card written by hand only the tags change."""
    path = Path(folder, CARD)
    card = ModelCard.load(path) if path.is_file() else None
    tags = list(card.data.tags or []) if card is not None else []
    if card is not None and not is_mars_card(card) and EMPTY_CARD not in card.text:
        add_tags(card, ["mars"])
    elif card is None or not is_mars_card(card):
        base = base_model(model)
        tags += base.model_tags or []
        card = make_card(
            CardFacts(
                name=repo_id.split("/")[-1],
                repo=repo_id,
                block_size=base.generation_config.mars_block_size,
                base_model=_hub_name(base.config, repo_id),
                tags=tags,
                is_adapter=base is not model,
            )
        )
    card.save(path)


def read_card(folder: str | os.PathLike[str]) -> ModelCard | None:
    """The model card of a folder, if it is one of a MARS checkpoint."""
    path = Path(folder, CARD)
    card = ModelCard.load(path) if path.is_file() else None
    return card if card is not None and is_mars_card(card) else None


def write_trainer_card(trainer: Any, dataset_name: str | None, name: str | None, earlier: ModelCard | None) -> None:
    """Write the card and the `custom_generate` folder into a trainer's output folder, over the card that TRL wrote.

    Of TRL's card the tags stay, and the part from the training procedure on; of an earlier card of the same weights,
    what was measured.
    """
    folder = trainer.args.output_dir
    written = ModelCard.load(Path(folder, CARD))
    base = base_model(trainer.model)
    _, heading, rest = written.text.partition("## Training procedure")
    # A folder's name, not its path: the card may be published later.
    repo_id = trainer.hub_model_id or trainer.args.hub_model_id or Path(folder).resolve().name
    datasets = [dataset_name] if dataset_name else _hub_datasets(trainer.train_dataset)
    facts = CardFacts(
        name=name or repo_id.split("/")[-1],
        repo=repo_id,
        block_size=base.generation_config.mars_block_size,
        base_model=_hub_name(base.config, repo_id),
        datasets=datasets,
        tags=list(written.data.tags or []),
        is_adapter=base is not trainer.model,
        training=_logged(_history(trainer)),
        tail=heading + rest,
    )
    card = make_card(facts)
    if earlier is not None:
        keep_results(card, earlier)
    card.save(Path(folder, CARD))
    write_bundle(folder)


def _history(trainer: Any) -> list[dict[str, float]]:
    """The log of a training, up to the step whose weights it has in the end."""
    state = trainer.state
    if not (trainer.args.load_best_model_at_end and trainer.control.should_training_stop and state.best_global_step):
        return state.log_history
    return [entry for entry in state.log_history if entry["step"] <= state.best_global_step]


def _logged(history: list[dict[str, float]]) -> dict[str, float]:
    """The last figures of a training's log, those of the evaluation data where there are any."""
    for prefix in ("eval_", ""):
        for entry in reversed(history):
            if found := {prefix + name: entry[prefix + name] for name in TRAINING_METRICS if prefix + name in entry}:
                return found
    return {}


def _hub_name(config: Any, repo_id: str) -> str | None:
    """The repository that a model was loaded from, None for the repository that it goes to and for any path."""
    name = getattr(config, "_name_or_path", None)
    if not name or name == repo_id or os.path.isdir(name):
        return None
    try:
        # A folder that is gone by now is no repository either, and its path says where somebody keeps what.
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _hub_datasets(dataset: Any) -> list[str]:
    """The repository of a dataset that was loaded from the Hub."""
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    names = {source.removeprefix("hf://datasets/").split("@")[0] for source in sources if source.startswith("hf://")}
    return sorted(name for name in names if name.count("/") == 1)


def _is_trained(model: Any) -> bool:
    """Whether a model records its mask token; one that does not is saved as the stock class saves it."""
    return getattr(base_model(model).generation_config, "mars_mask_token_id", None) is not None
