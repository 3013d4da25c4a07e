"""`BlockDiffusionTrainer`: turn an autoregressive model into a block-diffusion one with TRL's `SFTTrainer`.

Shapes: N rows of a batch, L tokens of an example, T tokens of a two-stream sequence, B the block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import pad

from ..checks import check_count
from ..fused_head import finish_loss, mode_of, score_targets
from ..loading import give_mask_token, init_kwargs_used_up, load_model, load_tokenizer
from ..mask_token import find_mask_token
from ..masks import CLEAN, PADDING, stream_layout
from ..model_masks import masks_for_model
from ..refusals import refuse_arguments, refuse_model, refuse_parallelism, refuse_processor
from .block_diffusion import NOISY, block_diffusion_loss, dense_block_mask, draw_noise


@dataclass
class BlockDiffusionConfig(SFTConfig):
    """`SFTConfig` with what block diffusion adds.

    Args:
        block_size: number of tokens in a block, B.
        noise_low: lowest noise level t. Not 0: a token masked at level t weighs 1/t.
        noise_high: highest noise level t, at most 1.
        mask_token: the mask token. None takes the tokenizer's own, or adds `<|mask|>`.

    Raises:
        ValueError: for a value out of range, and for packing, padding-free batches and label smoothing.
    """

    block_size: int = field(default=4, metadata={"help": "Number of tokens in a block."})
    noise_low: float = field(default=1e-3, metadata={"help": "Lowest share of a block's targets that is masked."})
    noise_high: float = field(default=1.0, metadata={"help": "Highest share of a block's targets that is masked."})
    mask_token: str | None = field(
        default=None,
        metadata={"help": "The mask token. If not set, the tokenizer's own is used, or `<|mask|>` is added to it."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_count("block_size", self.block_size, 1)
        if not 0 < self.noise_low <= self.noise_high <= 1:
            raise ValueError(
                "Noise levels must satisfy 0 < `noise_low` <= `noise_high` <= 1, got "
                f"{self.noise_low!r} and {self.noise_high!r}."
            )
        for name in ("packing", "padding_free", "eval_packing"):
            if getattr(self, name):
                raise ValueError(f"Block diffusion trains on padded rows only. Set `{name}=False`.")
        if self.loss_type not in (None, "nll"):
            raise ValueError(f"Block diffusion has its own loss. Leave `loss_type` at 'nll', got {self.loss_type!r}.")

    def to_dict(self) -> dict[str, Any]:
        """As `SFTConfig` does, which takes whatever ends in `_token` for a secret: the mask token is none."""
        return {**super().to_dict(), "mask_token": self.mask_token}


@dataclass
class DataCollatorForBlockDiffusion(DataCollatorForLanguageModeling):
    """Collator for block diffusion: each row is an example's clean stream with its noisy stream right behind it.

    The noisy stream holds the blocks that have a target, whole; other blocks change nothing in the loss. An example
    that ends with a target is filled up to a whole block with targets of `fill_token_id`, because sampling meets whole
    blocks only. An example of `max_length` tokens may be cut, and is not filled.

    Keys of the batch: `input_ids`, `position_ids`, `stream_ids`, `target_ids` (-100 where nothing is scored) and
    `noise_level`, all (N, T); `labels` (N, longest L), every target, masked in this draw or not.

    Args:
        pad_token_id: id that fills rows.
        mask_token_id: id of the mask token.
        fill_token_id: id that fills an example's last block: the one that ends a sequence.
        block_size: B.
        noise_range: lowest and highest noise level, see `draw_noise`.
        max_length: the length that examples are cut to, or None.
    """

    mask_token_id: int = field(kw_only=True)
    fill_token_id: int = field(kw_only=True)
    block_size: int = field(kw_only=True)
    noise_range: tuple[float, float] = field(default=(1e-3, 1.0), kw_only=True)
    max_length: int | None = field(default=None, kw_only=True)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [self._row(example) for example in examples]
        padding = {
            "input_ids": self.pad_token_id,
            "position_ids": 0,
            "target_ids": -100,
            "stream_ids": PADDING,
            "noise_level": 1.0,
            "labels": -100,
        }
        return {
            key: pad([row[key] for row in rows], value, "right", self.pad_to_multiple_of)
            for key, value in padding.items()
        }

    def _row(self, example: dict[str, Any]) -> dict[str, Tensor]:
        ids = torch.as_tensor(example["input_ids"], dtype=torch.long)
        labels = torch.as_tensor(example.get("labels", example["input_ids"]), dtype=torch.long)
        missing = -len(ids) % self.block_size
        was_cut = self.max_length is not None and len(ids) >= self.max_length
        if missing and not was_cut and labels[-1] != -100:
            fill = torch.full((missing,), self.fill_token_id)
            ids, labels = torch.cat([ids, fill]), torch.cat([labels, fill])
        position = torch.arange(len(ids))
        block = position // self.block_size
        is_target = labels != -100
        # As in `SFTTrainer`, the first token is given, so that losses are over the same targets.
        is_target[:1] = False
        masked, level = draw_noise(is_target, block, self.noise_range)
        noisy = torch.isin(block, block[is_target])
        return {
            "input_ids": torch.cat([ids, ids.masked_fill(masked, self.mask_token_id)[noisy]]),
            "position_ids": torch.cat([position, position[noisy]]),
            "target_ids": torch.cat([torch.full_like(ids, -100), torch.where(masked, labels, -100)[noisy]]),
            "stream_ids": torch.cat([torch.full_like(ids, CLEAN), torch.full_like(position[noisy], NOISY)]),
            "noise_level": torch.cat([torch.ones(len(ids)), level[noisy]]),
            "labels": torch.where(is_target, labels, -100),
        }


class BlockDiffusionTrainer(SFTTrainer):
    """`SFTTrainer` with the loss of block diffusion in place of its own; sample with `block_diffusion_generate`.

    It gives the tokenizer a mask token if it has none, and logs `mask_accuracy`: how often the likeliest token of a
    masked position is the right one, over all noise levels.

    Args:
        model: a decoder-only model, or the path of one; not wrapped by PEFT.
        args: a `BlockDiffusionConfig`.
        processing_class: the tokenizer; by default that of `model`.
        kwargs: what else `SFTTrainer` takes, but for a collator, a loss function and a PEFT configuration.

    Raises:
        ValueError: for arguments and models that the second stream rules out.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "block-diffusion", "sft"]
    _name = "Block Diffusion"

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: BlockDiffusionConfig,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        if not isinstance(args, BlockDiffusionConfig):
            raise ValueError(f"`args` must be a `BlockDiffusionConfig`, got `{type(args).__name__}`.")
        refuse_arguments(args, kwargs.get("data_collator"), kwargs.get("compute_loss_func"))
        for name in ("peft_config", "compute_metrics", "quantization_config"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`BlockDiffusionTrainer` is a baseline and does not take `{name}`. Leave it unset.")
        if processing_class is not None:
            refuse_processor(processing_class)
        set_seed(args.seed)  # as in `SFTTrainer`, and here already because a new embedding row is drawn at random
        is_loaded = False
        if isinstance(model, str):
            is_loaded, model = True, load_model(model, args, None)
        if is_peft_model(model):
            raise ValueError("`BlockDiffusionTrainer` trains whole models. Merge the adapter, or pass the base model.")
        refuse_model(model, args.device)
        if model.config.get_text_config()._attn_implementation not in ("sdpa", "eager"):
            raise ValueError("Block diffusion needs a dense mask. Load the model with `attn_implementation='sdpa'`.")
        if processing_class is None:
            processing_class = load_tokenizer(model, args, is_loaded)
        optimizer, _ = kwargs.get("optimizers") or (None, None)
        _, self._mask_token_id = give_mask_token(model, args, processing_class, args.mask_token, None, optimizer)
        with init_kwargs_used_up(args, is_loaded):
            super().__init__(
                model=model,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                **{key: value for key, value in kwargs.items() if value is not None},
            )
        # Again, because a configuration in the launcher's file shows in the accelerator only.
        refuse_parallelism(self.accelerator.parallelism_config)
        # All accumulated targets are counted, whatever a model's own loss takes.
        self.model_accepts_loss_kwargs = True
        self._set_collator()

    def _set_collator(self) -> None:
        """Give the trainer its collator, now that the arguments have given the tokenizer its end and its padding."""
        find_mask_token(self._tokenizer)  # which may be another's meaning now
        fill = self._tokenizer.eos_token_id
        if fill is None:
            raise ValueError("Block diffusion fills the last block with the end of the text. Set an `eos_token`.")
        self.data_collator = DataCollatorForBlockDiffusion(
            pad_token_id=self._tokenizer.pad_token_id,
            pad_to_multiple_of=self.args.pad_to_multiple_of,
            mask_token_id=self._mask_token_id,
            fill_token_id=fill,
            block_size=self.args.block_size,
            noise_range=(self.args.noise_low, self.args.noise_high),
            max_length=self.args.max_length,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        layout = stream_layout(inputs["stream_ids"], inputs["position_ids"], self.args.block_size)
        target_ids = inputs["target_ids"]
        outputs = score_targets(
            model,
            self.accelerator.unwrap_model(self.model),
            target_ids,
            {
                "input_ids": inputs["input_ids"],
                "attention_mask": masks_for_model(
                    self.model.config, self.model.dtype, lambda window: dense_block_mask(layout, window)
                ),
                "position_ids": inputs["position_ids"],
                "use_cache": False,
            },
            routed=inputs["stream_ids"] != PADDING if self.aux_loss_enabled else None,
        )
        is_masked = target_ids != -100
        num_targets = num_items_in_batch
        if num_targets is None:
            num_targets = (inputs["labels"] != -100).sum()
        loss = block_diffusion_loss(outputs.log_probs, is_masked, inputs["noise_level"], num_targets)
        loss = finish_loss(self, loss, outputs.aux_loss, num_items_in_batch)
        sums = torch.stack([(outputs.is_top1.bool() & is_masked).sum(), is_masked.sum()]).float()
        correct, masked = self.accelerator.gather_for_metrics(sums[None]).sum(0).tolist()
        if masked > 0:
            self._metrics[mode_of(self)]["mask_accuracy"].append(correct / masked)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # There are no logits to hand out: only the masked positions meet the head.
        return super().prediction_step(model, inputs, True, ignore_keys)
