"""Load the model of a path for training, before PEFT wraps it, and the tokenizer that belongs to a model."""

from __future__ import annotations

from transformers import AutoConfig, AutoProcessor, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import create_model_from_path, get_config_model_id

from .refusals import refuse_config, refuse_processor
from .sft_config import MarsSFTConfig


def load_model(path: str, args: MarsSFTConfig, quantization_config: BitsAndBytesConfig | None) -> PreTrainedModel:
    """Load a model by the rules of `SFTTrainer`, because the mask token must be there before PEFT wraps it.

    Raises:
        ValueError: if its configuration rules out MARS, before the weights are loaded; or if the quantization is
            given twice.
    """
    kwargs = dict(args.model_init_kwargs or {})
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "`quantization_config` is set both as a trainer argument and in `model_init_kwargs`. Set it once, "
                "preferably as a trainer argument."
            )
        kwargs["quantization_config"] = quantization_config
    # A launcher places each process's model itself.
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    config = AutoConfig.from_pretrained(
        path, revision=kwargs.get("revision"), trust_remote_code=kwargs["trust_remote_code"]
    )
    config._attn_implementation = kwargs.get("attn_implementation") or "sdpa"
    refuse_config(config, args.device)
    return create_model_from_path(path, **kwargs)


def load_tokenizer(model: PreTrainedModel, args: MarsSFTConfig, revision: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model by the rules of `SFTTrainer`.

    Raises:
        ValueError: if the model comes with the processor of a vision-language model.
    """
    processor = AutoProcessor.from_pretrained(
        get_config_model_id(model.config), revision=revision, trust_remote_code=args.trust_remote_code
    )
    refuse_processor(processor)
    return processor
