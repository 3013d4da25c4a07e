"""What the README shows, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import SMALL, make_tokenizer
from datasets import Dataset
from test_sft_trainer import PROMPT
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_three_lines_of_a_trl_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("-") for line in lines) == sum(line.startswith("+") for line in lines) == 2
    script = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    (name,) = set(re.findall(r'Trainer\("(.*?)"', script))
    tokenizer = make_tokenizer()
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": len(tokenizer)})).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    # Without a GPU, TRL's default of bfloat16 wants `use_cpu`.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    scope = {"dataset": Dataset.from_list(PROMPT)}
    exec(script.replace(name, "model"), scope)
    trainer = scope["trainer"]
    assert trainer.state.global_step == 3
    trainer.save_model()
    assert GenerationConfig.from_pretrained("out").mars_block_size == 4
