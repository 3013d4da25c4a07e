"""Which way of laying blocks teaches best: from the first token or at random, of one size or growing?

    python recipes/teaching_study.py --output_dir teaching-study

For every seed an ordinary model learns the quickstart's worked arithmetic, and from this checkpoint each way goes on
for the same number of MARS steps. The table has the mean over the seeds with its 95% interval, and the mean difference
to the first way within a seed. Lossless decoding gives the text of plain `generate`, so its tokens per forward are
those at equal accuracy. Results are kept in `results.jsonl`: seeds can be run one after the other, and a way of a seed
that was measured with the same figures is not repeated.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import datasets
import torch
from _arguments import Distinct, positive
from _arithmetic import make_model, make_problems, to_chat, train_tokenizer
from _measure import FinalAnswer, Setting, measure
from _store import Store
from datasets import Dataset
from quickstart import BATCH_SIZE, MAX_NEW_TOKENS, training_arguments
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
    parser.add_argument("--seeds", type=int, nargs="+", action=Distinct, default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument(
        "--ways", nargs="+", action=Distinct, choices=list(WAYS), default=list(WAYS), help="(default: all)"
    )
    parser.add_argument("--block_size", type=positive, default=4, help="(default: 4)")
    parser.add_argument("--ar_steps", type=positive, default=300, help="steps of SFTTrainer before (default: 300)")
    parser.add_argument("--mars_steps", type=positive, default=150, help="steps of each way (default: 150)")
    parser.add_argument("--eval_examples", type=positive, default=200, help="unseen problems to answer (default: 200)")
    parser.add_argument("--fast", action="store_true", help="one seed and two steps, to see it run: learns nothing")
    args = parser.parse_args()
    if args.fast:
        args.seeds, args.ar_steps, args.mars_steps, args.eval_examples = [0], 2, 2, 2
    return args


def figures(args: argparse.Namespace) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {name: getattr(args, name) for name in ("block_size", "ar_steps", "mars_steps", "eval_examples")}


def train_start(args: argparse.Namespace, seed: int, problems: list[dict[str, str]], dataset: Dataset) -> Path:
    """The ordinary model that every way of a seed goes on from, trained if it is not there yet."""
    start = args.output_dir / f"ar-sft-{seed}-{args.ar_steps}-{args.eval_examples}"
    if start.exists():
        return start
    work = start.with_name(start.name + ".part")
    set_seed(seed)
    tokenizer = train_tokenizer(problems)
    trainer = SFTTrainer(
        make_model(tokenizer, 64, 8),
        args=SFTConfig(str(work), max_steps=args.ar_steps, learning_rate=4e-3, **training_arguments(seed, 20)),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    os.replace(work, start)  # whole or not there
    return start


def study(args: argparse.Namespace, seed: int, way: str) -> dict[str, float]:
    """Train one way from the ordinary model of a seed, and answer the unseen problems."""
    problems = make_problems(args.eval_examples + BATCH_SIZE * args.ar_steps, seed)
    unseen, dataset = problems[: args.eval_examples], to_chat(problems[args.eval_examples :])
    start = train_start(args, seed, problems, dataset)
    config = MarsSFTConfig(
        str(args.output_dir / "mars"),
        max_steps=args.mars_steps,
        learning_rate=2e-3,
        mars_block_size=args.block_size,
        **WAYS[way],
        **training_arguments(seed, 20),
    )
    trainer = MarsSFTTrainer(str(start), args=config, train_dataset=dataset)
    trainer.train()
    questions, answers = ([problem[key] for problem in unseen] for key in ("question", "answer"))
    runs = measure(trainer.model.eval(), trainer.processing_class, questions, SETTINGS, 50, MAX_NEW_TOKENS)
    row = {}
    for setting, run in runs.items():
        replies = trainer.processing_class.batch_decode(run.tokens, skip_special_tokens=True)
        score = FinalAnswer().compute(predictions=replies, references=answers)
        row[f"accuracy at {setting or 1.0}"] = score["accuracy"]
        if setting is not None:
            row[f"tokens per forward at {setting}"] = run.tokens_per_forward
    return row


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
    store, common = Store(args.output_dir / "results.jsonl"), figures(args)
    for seed in args.seeds:
        for way in args.ways:
            row = {"seed": seed, "way": way, **common}
            key = json.dumps([row, WAYS[way]])
            if key not in store:
                store.add(key, **row, **study(args, seed, way))
    # Those of earlier runs too, as long as they were made alike.
    rows = [row for row in store.records.values() if common.items() <= row.items()]
    console.print(to_table(rows))


if __name__ == "__main__":
    main()
