"""Train the systems of the paper's tables, each once, into a cache folder that all tables share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _arithmetic import make_model, make_problems, to_chat, train_tokenizer
from _measure import refuse_open_problems
from _problems import read_problems
from datasets import Dataset, load_dataset
from paper_settings import SYSTEMS, Scale, System, fingerprint
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from mars_hf import AutoMarsModelForCausalLM, MarsSFTConfig, MarsSFTTrainer, get_mars_model
from mars_hf.baselines import BlockDiffusionConfig, BlockDiffusionTrainer

Problems = list[dict[str, str]]


class Lab:
    """Data, models and checkpoints of one scale.

    Args:
        scale: how large, how long, on what data.
        folder: checkpoints go into its `checkpoints`.
        given: checkpoints that are ready and need no training, by system.
        say: called with a line of text when something begins.
    """

    def __init__(
        self,
        scale: Scale,
        folder: Path,
        given: dict[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.scale, self.folder, self.given, self.say = scale, folder, given or {}, say
        # What does not change from seed to seed is made once.
        self.problems = cache(self._problems)
        self.train_data = cache(self._train_data)

    def _problems(self, seed: int) -> Problems:
        """Problems to answer: `question` and `answer`."""
        scale = self.scale
        if scale.eval_data == "arithmetic":
            return make_problems(scale.eval_examples, seed)
        problems = load_problems(scale.eval_data, "test")[: scale.eval_examples]
        refuse_open_problems(problems, scale.eval_data)
        return problems

    def _arithmetic(self, seed: int) -> Problems:
        """Problems to learn from; none of them is one to answer."""
        scale = self.scale
        steps = max(scale.ar_steps or 0, scale.steps or 0)
        count = scale.per_device_batch_size * scale.gradient_accumulation * steps
        return make_problems(scale.eval_examples + count, seed)[scale.eval_examples :]

    def _train_data(self, seed: int) -> Dataset:
        scale = self.scale
        if scale.train_data == "arithmetic":
            return to_chat(self._arithmetic(seed))
        if Path(scale.train_data).exists():
            return to_chat(load_problems(scale.train_data, "train"))
        return load_dataset(scale.train_data, split="train")  # with `messages`, as TRL reads it

    def start(self, system: System, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model that the first stage starts from."""
        scale = self.scale
        name = scale.draft_model if system.is_draft else scale.model
        if name == "arithmetic":
            tokenizer = train_tokenizer(self._arithmetic(seed))
            set_seed(seed)
            layers = max(1, scale.num_layers // 4) if system.is_draft else scale.num_layers
            return make_model(tokenizer, scale.hidden_size, layers), tokenizer
        model = AutoMarsModelForCausalLM.from_pretrained(name, dtype="float32")
        return model, AutoTokenizer.from_pretrained(name, padding_side="left")

    def fingerprint(self, name: str, seed: int) -> str:
        """What tells a system's checkpoint of a seed from others; one that is given is the same for every seed."""
        return fingerprint(name, self.scale, 0 if name in self.given else seed, self.given)

    def checkpoint(self, name: str, seed: int) -> Path:
        """The checkpoint of a system, trained if it is not there yet."""
        if name in self.given:
            return Path(self.given[name])
        path = self.folder / "checkpoints" / self.fingerprint(name, seed)
        if path.exists():
            return path
        system = SYSTEMS[name]
        if system.start is None:
            model, tokenizer = self.start(system, seed)
        else:
            model, tokenizer = self.load(system.start, seed)
        self.say(f"Training {name}, seed {seed}")
        work = path.with_name(path.name + ".part")
        trainer = self.trainer(system, seed, model, tokenizer, work)
        # A checkpoint is there only if the run was long enough for one, and was stopped after it.
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work)) if work.is_dir() else None)
        trainer.save_model()
        if trainer.is_world_process_zero():
            log = json.dumps(trainer.state.log_history)
            (work / "log_history.json").write_text(log)
            os.replace(work, path)  # whole or not there
        trainer.accelerator.wait_for_everyone()
        return path

    def last_log(self, name: str, seed: int) -> dict[str, float]:
        """What training logged last; empty for a checkpoint that was given."""
        if name in self.given:
            return {}
        path = self.checkpoint(name, seed) / "log_history.json"
        entries = json.loads(path.read_text()) if path.exists() else []
        return next((entry for entry in reversed(entries) if "mean_token_accuracy" in entry), {})

    def load(self, name: str, seed: int, for_generation: bool = False) -> tuple[Any, PreTrainedTokenizerBase]:
        """A trained system and its tokenizer."""
        path = self.checkpoint(name, seed)
        # Trained in float32, under bfloat16 autocast where the scale says so: bfloat16 weights lose a step of 5e-6.
        dtype = self.scale.dtype if for_generation else "float32"
        model = AutoMarsModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        if for_generation:
            get_mars_model(model, mask_token_id=tokenizer.mask_token_id)
            model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        return model, tokenizer

    def trainer(
        self,
        system: System,
        seed: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        output_dir: Path,
        examples: int | None = None,
    ) -> Any:
        """The trainer of a system, ready to train, on the first so many examples only if that is said."""
        common = self._arguments(system, seed, output_dir)
        data = self.train_data(seed)
        if examples is not None:
            data = data.select(range(min(examples, len(data))))
        rest = {"train_dataset": data, "processing_class": tokenizer}
        if system.trainer == "sft":
            return SFTTrainer(model, args=SFTConfig(**common), **rest)
        if system.trainer == "mars":
            args = MarsSFTConfig(mars_block_size=system.block_size, mars_ar_weight=system.ar_weight, **common)
            return MarsSFTTrainer(model, args=args, **rest)
        return BlockDiffusionTrainer(model, BlockDiffusionConfig(block_size=system.block_size, **common), **rest)

    def _arguments(self, system: System, seed: int, output_dir: Path) -> dict[str, Any]:
        scale, is_first = self.scale, system.start is None
        steps = scale.ar_steps if is_first else scale.steps
        on_gpu = torch.cuda.is_available()
        return {
            "output_dir": str(output_dir),
            "per_device_train_batch_size": scale.per_device_batch_size,
            "gradient_accumulation_steps": scale.gradient_accumulation,
            "learning_rate": scale.ar_learning_rate if is_first else scale.learning_rate,
            "max_length": scale.max_length,
            "lr_scheduler_type": "cosine",
            "warmup_steps": scale.warmup_ratio,  # below 1 it is a share of the steps
            "logging_steps": 50,
            "save_strategy": "steps" if scale.save_steps else "no",
            "save_steps": scale.save_steps or 500,
            "save_total_limit": 1,
            "report_to": "none",
            "seed": seed,
            "bf16": scale.dtype == "bfloat16",
            "use_cpu": not on_gpu,
            "activation_checkpointing": False,
            "dataloader_pin_memory": on_gpu,
            "disable_tqdm": True,
            **({"num_train_epochs": scale.epochs} if steps is None else {"max_steps": steps}),
        }


def load_problems(source: str, split: str) -> Problems:
    """Problems with `question` and `answer`, from a file of JSON lines or from the Hub."""
    if Path(source).exists():
        return read_problems(Path(source), columns=("question", "answer"))
    return load_dataset(source, "main" if source == "openai/gsm8k" else None, split=split).to_list()
