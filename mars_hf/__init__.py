"""MARS: fine-tune a causal LM to emit several tokens per forward pass, and generate with it.

The names below are imported when they are first used, so that whoever only generates does not load TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.cache import MarsCache
    from mars_hf.collator import DataCollatorForMars
    from mars_hf.generation import MarsGenerationMixin
    from mars_hf.mask_token import add_mask_token
    from mars_hf.masks import mars_attention_mask
    from mars_hf.model_card import record_results
    from mars_hf.modeling import AutoMarsModelForCausalLM, get_mars_model
    from mars_hf.options import MarsStep
    from mars_hf.outputs import MarsGenerateOutput
    from mars_hf.sft_config import MarsSFTConfig
    from mars_hf.sft_trainer import MarsSFTTrainer

__version__ = "0.1.0"

__all__ = [
    "AutoMarsModelForCausalLM",
    "DataCollatorForMars",
    "MarsCache",
    "MarsGenerateOutput",
    "MarsGenerationMixin",
    "MarsSFTConfig",
    "MarsSFTTrainer",
    "MarsStep",
    "add_mask_token",
    "get_mars_model",
    "mars_attention_mask",
    "record_results",
]

_MODULE_OF = {
    "AutoMarsModelForCausalLM": "modeling",
    "DataCollatorForMars": "collator",
    "MarsCache": "cache",
    "MarsGenerateOutput": "outputs",
    "MarsGenerationMixin": "generation",
    "MarsSFTConfig": "sft_config",
    "MarsSFTTrainer": "sft_trainer",
    "MarsStep": "options",
    "add_mask_token": "mask_token",
    "get_mars_model": "modeling",
    "mars_attention_mask": "masks",
    "record_results": "model_card",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"mars_hf.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # found here from now on, without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
