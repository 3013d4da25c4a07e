"""Which way of laying blocks teaches best: from the first token or at random, of one size or growing?

    python recipes/teaching_study.py --output_dir teaching-study

For every seed an ordinary model learns the quickstart's worked arithmetic, and from this checkpoint each way goes on
for the same number of MARS steps. The table has the mean over the seeds with its 95% interval, and the mean difference
to the first way within a seed. Lossless decoding gives the text of plain `generate`, so its tokens per forward are
those at equal accuracy. Results are kept in `results.jsonl`: seeds can be run one after the other, and are not
repeated.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import datasets
import torch
from _arithmetic import make_model, make_problems, train_tokenizer
from _measure import FinalAnswer, Setting, measure
from quickstart import BATCH_SIZE, MAX_NEW_TOKENS, to_chat
from rich.console import Console
from rich.table import Table
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

from mars_hf import MarsSFTConfig, MarsSFTTrainer

WAYS: dict[str, dict[str, Any]] = {
    "fixed": {"mars_block_offset": "fixed"},
    "random": {"mars_block_offset": "random"},
    "fixed, growing": {"mars_block_offset": "fixed", "mars_block_curriculum": 0.5},
    "random, growing": {"mars_block_offset": "random", "mars_block_curriculum": 0.5},
}
SETTINGS: list[Setting] = [0.95, 0.8, "lossless"]
# Student's t for a 95% interval from 2, 3, ... 10 values.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)

console = Console()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("teaching-study"), help="(default: teaching-study)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="(default: all)")
    parser.add_argument("--block_size", type=int, default=4, help="(default: 4)")
    parser.add_argument("--ar_steps", type=int, default=300, help="steps of SFTTrainer before (default: 300)")
    parser.add_argument("--mars_steps", type=int, default=150, help="steps of each way (default: 150)")
    parser.add_argument("--eval_examples", type=int, default=200, help="unseen problems to answer (default: 200)")
    parser.add_argument("--fast", action="store_true", help="one seed and two steps, to see it run: learns nothing")
    args = parser.parse_args()
    if args.fast:
        args.seeds, args.ar_steps, args.mars_steps, args.eval_examples = [0], 2, 2, 2
    return args


def common_arguments(seed: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": BATCH_SIZE,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": seed,
    }


def study_seed(args: argparse.Namespace, seed: int, ways: Sequence[str]) -> list[dict[str, Any]]:
    """Train one ordinary model and from it each way; a row of figures for each."""
    problems = make_problems(args.eval_examples + BATCH_SIZE * args.ar_steps, seed)
    unseen, dataset = problems[: args.eval_examples], to_chat(problems[args.eval_examples :])
    start = args.output_dir / f"ar-sft-{seed}-{args.ar_steps}"
    if not start.exists():
        set_seed(seed)
        tokenizer = train_tokenizer(problems)
        ar_trainer = SFTTrainer(
            make_model(tokenizer, 64, 8),
            args=SFTConfig(str(start), max_steps=args.ar_steps, learning_rate=4e-3, **common_arguments(seed)),
            train_dataset=dataset,
            processing_class=tokenizer,
        )
        ar_trainer.train()
        ar_trainer.save_model()
    rows = []
    for way in ways:
        config = MarsSFTConfig(
            str(args.output_dir / "mars"),
            max_steps=args.mars_steps,
            learning_rate=2e-3,
            mars_block_size=args.block_size,
            **WAYS[way],
            **common_arguments(seed),
        )
        trainer = MarsSFTTrainer(str(start), args=config, train_dataset=dataset)
        trainer.train()
        questions = [problem["question"] for problem in unseen]
        runs = measure(trainer.model.eval(), trainer.processing_class, questions, SETTINGS, 50, MAX_NEW_TOKENS)
        row: dict[str, Any] = {"seed": seed, "way": way, "block_size": args.block_size}
        for setting, run in runs.items():
            replies = trainer.processing_class.batch_decode(run.tokens, skip_special_tokens=True)
            answers = [problem["answer"] for problem in unseen]
            row[f"accuracy at {setting or 1.0}"] = FinalAnswer().compute(predictions=replies, references=answers)[
                "accuracy"
            ]
            if setting is not None:
                row[f"tokens per forward at {setting}"] = run.tokens_per_forward
        rows.append(row)
    return rows


def interval(values: Sequence[float], percent: bool, sign: bool = False) -> str:
    """Mean and half the width of its 95% interval."""
    number = (
        f"{100 * mean(values):{'+' if sign else ''}.1f}%" if percent else f"{mean(values):{'+' if sign else ''}.2f}"
    )
    if len(values) < 2:
        return number
    half = T_95[min(len(values), 10) - 2] * stdev(values) / len(values) ** 0.5
    return number + (f" ± {100 * half:.1f}" if percent else f" ± {half:.2f}")


def to_table(rows: list[dict[str, Any]]) -> Table:
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    table = Table("figure", *ways, title="Mean over seeds ± 95% interval; below it the difference to the first way")
    for name in [name for name in rows[0] if " at " in name]:
        values = {way: {row["seed"]: row[name] for row in rows if row["way"] == way} for way in ways}
        percent = name.startswith("accuracy")
        table.add_row(name, *(interval(list(values[way].values()), percent) for way in ways))
        differences = ["" for _ in ways[:1]]
        for way in ways[1:]:
            pairs = [(values[way][seed], values[ways[0]][seed]) for seed in values[way] if seed in values[ways[0]]]
            differences.append(interval([a - b for a, b in pairs], percent, sign=True) if pairs else "")
        table.add_row("", *differences)
    return table


def main() -> None:
    args = parse_args()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # so small a model is no faster on more
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["seed"], row["way"], row["block_size"]) for row in rows}
    for seed in args.seeds:
        ways = [way for way in args.ways if (seed, way, args.block_size) not in done]
        new = study_seed(args, seed, ways) if ways else []
        rows += new
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
    console.print(to_table([row for row in rows if row["block_size"] == args.block_size]))


if __name__ == "__main__":
    main()
