"""Train a tiny MARS checkpoint and write down what decoding must give, from its definition.

Runs in the environment of the library:

python tests/vllm/make_reference.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from conftest import make_tokenizer  # noqa: E402
from definition import decode  # noqa: E402

from mars_hf import MarsSFTConfig, MarsSFTTrainer  # noqa: E402

THRESHOLDS = (0.5, 0.8, 0.95)
BLOCK_SIZE, NEW_TOKENS = 4, 48
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve")
THINGS = ("apples", "books", "coins", "pens")


def problem(rng: random.Random, count: int = 1) -> tuple[str, str]:
    """A question about `count` purchases, and its answer; the numbers are hard to guess, the words are not."""
    numbers = [rng.randint(1, 9) for _ in range(count)]
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    asked = " and ".join(f"{number} {thing}" for number in numbers)
    return (
        f"{name} buys {asked}. How many?",
        f"{name} has {' + '.join(map(str, numbers))} = {sum(numbers)} {thing} in all.",
    )


KNOWN = [problem(random.Random(seed), 1 + seed % 3) for seed in range(64)]


def train(folder: Path) -> PreTrainedModel:
    """A Llama of two layers that knows a few problems by heart, so that several of its tokens are accepted."""
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for question, answer in KNOWN
    ]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    arguments = MarsSFTConfig(
        str(folder),
        max_steps=500,
        per_device_train_batch_size=16,
        learning_rate=4e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        mars_block_size=BLOCK_SIZE,
        mars_block_offset="random",
        report_to="none",
        save_strategy="no",
        logging_steps=50,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    trainer = MarsSFTTrainer(
        LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    trainer.save_model(str(folder))
    return trainer.model.eval()


def main(folder: Path) -> None:
    model = train(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop, mask = tokenizer.eos_token_id, model.generation_config.mars_mask_token_id
    rng, cases = random.Random(1), []
    for index in range(24):
        # Every third problem is new to the model, and those are longer and longer, so that reading them takes several
        # chunks and several blocks of the KV cache.
        unknown = " ".join(problem(rng, 2)[0] for _ in range(1 + index // 3))
        question = unknown if index % 3 == 0 else KNOWN[index][0]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        wanted = {
            str(tau): decode(model, prompt, tau, stop, mask, BLOCK_SIZE, NEW_TOKENS) for tau in (1.0, *THRESHOLDS)
        }
        cases.append({"question": question, "prompt": prompt, "wanted": wanted})
    (folder / "reference.json").write_text(json.dumps({"mask": mask, "stop": stop, "cases": cases}))
    for tau in ("1.0", *map(str, THRESHOLDS)):
        runs = [case["wanted"][tau] for case in cases]
        tokens, forwards = sum(len(text) for text, _ in runs), sum(count for _, count in runs)
        same = sum(c["wanted"][tau][0] == c["wanted"]["1.0"][0] for c in cases)
        print(f"threshold {tau}: {tokens / forwards:.2f} tokens per forward, {same} of {len(cases)} as autoregressive")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
