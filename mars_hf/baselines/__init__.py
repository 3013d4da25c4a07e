"""What MARS is compared with: block diffusion, trained and sampled, and Jacobi decoding of an ordinary model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.baselines.block_diffusion import block_diffusion_loss, block_diffusion_mask
    from mars_hf.baselines.block_diffusion_sampler import block_diffusion_generate
    from mars_hf.baselines.block_diffusion_trainer import (
        BlockDiffusionConfig,
        BlockDiffusionTrainer,
        DataCollatorForBlockDiffusion,
    )
    from mars_hf.baselines.jacobi import jacobi_generate

_MODULE_OF = {
    "BlockDiffusionConfig": "block_diffusion_trainer",
    "BlockDiffusionTrainer": "block_diffusion_trainer",
    "DataCollatorForBlockDiffusion": "block_diffusion_trainer",
    "block_diffusion_generate": "block_diffusion_sampler",
    "block_diffusion_loss": "block_diffusion",
    "block_diffusion_mask": "block_diffusion",
    "jacobi_generate": "jacobi",
}

__all__ = [
    "BlockDiffusionConfig",
    "BlockDiffusionTrainer",
    "DataCollatorForBlockDiffusion",
    "block_diffusion_generate",
    "block_diffusion_loss",
    "block_diffusion_mask",
    "jacobi_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"mars_hf.baselines.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # found here from now on, without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
