"""`MarsSFTTrainer`: TRL's `SFTTrainer` with a second, masked stream in the loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import Tensor
from transformers import (
    BitsAndBytesConfig,
    DataCollator,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from trl import SFTTrainer
from trl.trainer.utils import get_config_model_id

from .clean_batch import clean_batch
from .collator import DataCollatorForMars
from .end_of_turn import record_end_of_turn
from .fused_head import finish_loss, make_head_readable, score_targets
from .hub import base_model, make_savable, read_card, write_trainer_card
from .loading import give_mask_token, init_kwargs_used_up, load_model, load_tokenizer, look_for_unused_parameters
from .losses import mars_loss
from .mask_token import find_mask_token, note_mask_trained, record_mask_token
from .masks import CLEAN, PADDING, Layout
from .model_masks import AttentionMask, training_masks
from .modeling import get_mars_model
from .packing import prepare_documents
from .refusals import (
    refuse_arguments,
    refuse_model,
    refuse_new_tokens,
    refuse_parallelism,
    refuse_processor,
)
from .sft_config import MarsSFTConfig, as_mars_config, block_size_at
from .stream_log import clean_stream_logged, log_streams, put_stream_metrics
from .streams import batch_layout, clean_rows
from .tiled_attention import tiled


class MarsSFTTrainer(SFTTrainer):
    """`SFTTrainer` that teaches a model to fill blocks of [MASK]s as well, for MARS decoding.

    It takes what `SFTTrainer` takes. It gives the tokenizer a mask token if it has none, collates two-stream
    batches and overrides `compute_loss`; the rest is `SFTTrainer`. It records `mars_block_size` and
    `mars_mask_token_id` in the model's generation config, where decoding finds them. `mars_mask_weight=0` does
    nothing of this and trains as `SFTTrainer` does, with the loss times `mars_ar_weight`.

    It logs, besides what `SFTTrainer` logs of the clean stream: `ar_loss`, `mask_loss`, `mask_accuracy`, the same by
    depth (`mask_accuracy/depth_k`: predicted from the k-th [MASK] of a block) and `tokens_per_forward@0.95`.

    Args:
        args: a `MarsSFTConfig`, or what `SFTTrainer` takes; that trains with the default MARS arguments.

    Raises:
        ValueError: for arguments and models that two streams rule out, before any data or weights are touched where
            that is possible; see `refusals`.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "mars", "sft"]
    _name = "MARS"

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: MarsSFTConfig | TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Any | None = None,
        formatting_func: Callable[[dict], str] | None = None,
    ):
        args = as_mars_config(args, model if isinstance(model, str) else get_config_model_id(model.config))
        self._has_masked_stream = args.mars_mask_weight > 0
        self._card_step: int | None = None
        # By mode: what `log` makes the metrics of both streams from.
        self._stream_totals: dict[str, dict[str, float]] = {"train": {}, "eval": {}}
        if not self._has_masked_stream:
            # The tags and the name that a card gives to the model.
            self._tag_names, self._name = SFTTrainer._tag_names, SFTTrainer._name  # type: ignore[misc]
        is_loaded = False
        if self._has_masked_stream:
            refuse_arguments(args, data_collator, compute_loss_func)
            if processing_class is not None:
                refuse_processor(processing_class)
            # As in `SFTTrainer`, and here already because a new embedding row is drawn at random.
            set_seed(args.seed)
            if isinstance(model, str):
                model = load_model(model, args, quantization_config)
                is_loaded, quantization_config = True, None
            refuse_model(base_model(model), args.device)
            make_savable(base_model(model).generation_config)
            look_for_unused_parameters(args, model)
            if processing_class is None:
                processing_class = load_tokenizer(model, args, is_loaded)
            peft_config, self._mask_token_id = give_mask_token(
                model, args, processing_class, args.mars_mask_token, peft_config, optimizers[0]
            )
        with init_kwargs_used_up(args, is_loaded):
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                quantization_config=quantization_config,
                peft_config=peft_config,
                formatting_func=formatting_func,
            )
        if self._has_masked_stream:
            # Again, because a configuration in the launcher's file shows in the accelerator only.
            refuse_parallelism(self.accelerator.parallelism_config)
            self._finish_mars()

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        prepare_sft = super()._prepare_dataset

        def prepare(data, arguments, packs):
            return prepare_sft(data, processing_class, arguments, packs, formatting_func, dataset_name)

        if not self._has_masked_stream:
            return prepare(dataset, args, packing)
        return prepare_documents(dataset, args, packing, prepare)

    def _finish_mars(self) -> None:
        """Swap the collator for the two-stream one, and record in the model what decoding must know."""
        # Again, because a cloned chat template may have brought a new end token.
        find_mask_token(self._tokenizer)
        if is_peft_model(self.model):
            refuse_new_tokens(self.model)
        self.data_collator = DataCollatorForMars(
            pad_token_id=self._tokenizer.pad_token_id,
            padding_free=self.args.padding_free,
            pad_to_multiple_of=self.args.pad_to_multiple_of,
            mask_token_id=self._mask_token_id,
            block_size=self.args.mars_block_size,
            block_offset=self.args.mars_block_offset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            dense_mask=False,
        )
        # The first token of a row is never scored, whatever a model's own loss does with it, so it is not counted; and
        # the targets of all accumulated batches are, whatever a model's own loss takes.
        self._loss_shifts_labels = self.model_accepts_loss_kwargs = True
        make_head_readable(base_model(self.model).get_output_embeddings())
        record_mask_token(base_model(self.model), self._mask_token_id)
        generation_config = base_model(self.model).generation_config
        generation_config.mars_block_size = self.args.mars_block_size
        record_end_of_turn(generation_config, self._tokenizer, self.train_dataset, self.chat_template)
        # Otherwise loading takes the generation config for a copy of the model's, and drops these entries.
        generation_config._from_model_config = False
        # So that `trainer.model.generate(mars_threshold=...)` works as soon as training is done.
        get_mars_model(self.model)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        if not (self._has_masked_stream and self.is_world_process_zero()):
            super().create_model_card(model_name, dataset_name, tags)
            return
        # What was measured since the last card was written is true as long as no step was taken.
        earlier = read_card(self.args.output_dir) if self._card_step == self.state.global_step else None
        super().create_model_card(model_name, dataset_name, tags)
        write_trainer_card(self, dataset_name, model_name, earlier)
        self._card_step = self.state.global_step

    def _save(self, output_dir=None, state_dict=None):
        # The arguments are pickled beside the weights, and pushed with them. A `MarsSFTConfig` leaves its token out of
        # every pickle; an own class of arguments would take it along.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._has_masked_stream:
            # Here the step is known, whatever the workers have prepared ahead and wherever training was resumed.
            step = self.state.global_step
            block_size = block_size_at(self.args, step, self.state.max_steps)
            if self.args.mars_block_curriculum:
                self._metrics["train"]["block_size"].append(block_size)
            if self.args.mars_block_offset == "random" or block_size != self.args.mars_block_size:
                batches = [self.data_collator.regrid(batch, step, block_size) for batch in batches]
        return batches, num_items_in_batch

    def _track_num_input_tokens(self, inputs):
        if self._has_masked_stream:
            clean = clean_rows(inputs)
            inputs = {"input_ids": clean["input_ids"], "attention_mask": clean["is_real"]}
        super()._track_num_input_tokens(inputs)

    def train(self, *args, **kwargs):
        self._card_step = None
        result = super().train(*args, **kwargs)
        # What an adapter has learned is lost to the model when it is unloaded.
        if self._has_masked_stream and self.state.global_step > 0 and not is_peft_model(self.model):
            note_mask_trained(self.model)
        return result

    def training_step(self, *args, **kwargs):
        # Around the backward pass too: what is checkpointed is computed there once more.
        with self._attention():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with self._attention():
            result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._has_masked_stream and "inputs" in self.args.include_for_metrics:
            # `Trainer` reads them afterwards, for `compute_metrics`.
            clean = {**self._clean_inputs(inputs), "labels": inputs["labels"]}
            inputs.clear()
            inputs.update(clean)
        return result

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self._has_masked_stream:
            return self._compute_sft_loss(model, inputs, return_outputs, num_items_in_batch)
        # The fused head of `SFTTrainer` scores the targets without building the logits of both streams.
        outputs = score_targets(
            model,
            base_model(self.model),
            inputs["target_ids"],
            {
                "input_ids": inputs["input_ids"],
                "attention_mask": self._attention_mask(batch_layout(inputs)),
                "position_ids": inputs["position_ids"],
                "use_cache": False,
            },
            routed=inputs["stream_ids"] != PADDING if self.aux_loss_enabled else None,
        )
        # With the model split across devices, the head is on another than the batch.
        scored = {key: value.to(outputs.log_probs.device) for key, value in inputs.items()}
        num_targets = num_items_in_batch
        if num_targets is None:
            num_targets = (outputs.label_mask & (scored["stream_ids"] == CLEAN)).sum()
        loss = mars_loss(
            outputs.log_probs,
            scored["stream_ids"],
            num_targets,
            self.args.mars_mask_weight,
            self.args.mars_ar_weight,
            self.args.loss_type,
        )
        # And `Trainer` wants the loss where the batch was.
        loss = finish_loss(self, loss, outputs.aux_loss, num_items_in_batch).to(self.args.device)
        log_streams(self, outputs, scored, self.args.mars_block_size, self._mask_token_id)
        if not return_outputs:
            return loss
        clean = self._clean_inputs(inputs)
        if self.aux_loss_enabled and "position_ids" in clean:
            # The router's loss of the model itself would take the mask that keeps documents apart for one of padding.
            clean["output_router_logits"] = False
        with torch.no_grad():
            return loss, model(**clean, use_cache=False)

    def evaluation_loop(self, *args, **kwargs):
        # `predict` logs nothing, and what it met is no part of the next evaluation.
        self._metrics["eval"].clear()
        self._stream_totals["eval"].clear()
        return super().evaluation_loop(*args, **kwargs)

    def log(self, *args, **kwargs):
        put_stream_metrics(self)
        super().log(*args, **kwargs)

    def _attention(self) -> AbstractContextManager[None]:
        return tiled(base_model(self.model)) if self._has_masked_stream else nullcontext()

    def _attention_mask(self, layout: Layout) -> AttentionMask:
        """The mask of a batch in the form that the model's attention reads; made once, for all layers."""
        return training_masks(self.model.config, self.model.dtype, layout)

    def _clean_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        return clean_batch(inputs, self._tokenizer.pad_token_id, self._attention_mask)

    def _compute_sft_loss(self, model, inputs, return_outputs, num_items_in_batch):
        """The loss of `SFTTrainer`, times `mars_ar_weight`; logs it as `ar_loss` as well."""
        with clean_stream_logged(self, model):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            return result[0] * self.args.mars_ar_weight, result[1]
        return result * self.args.mars_ar_weight
