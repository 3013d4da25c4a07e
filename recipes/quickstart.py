"""MARS from end to end, without network, GPU or arguments, in six to ten minutes on two cores.

    python recipes/quickstart.py

Makes worked arithmetic problems, trains a tokenizer and a small Llama on them with `SFTTrainer`, goes on with
`MarsSFTTrainer`, and compares `generate(mars_threshold=...)` with stock `generate` on problems it has not seen. Writes
the checkpoint and a picture of the trade-off to `--output_dir`; `recipes/generate.py` lets you talk to the checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import datasets
import matplotlib
from _arguments import positive
from _arithmetic import make_model, make_problems, to_chat, train_tokenizer
from _measure import FinalAnswer, Run, Setting, measure
from matplotlib import pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from mars_hf import MarsSFTConfig, MarsSFTTrainer, get_mars_model

# Wide and flat: in matrices like these a step of several tokens costs a CPU about what one of a single token costs, as
# in larger models. In a narrow and deep one the calls count, and they are more for MARS than for stock `generate`.
HIDDEN_SIZE, NUM_LAYERS = 448, 2
THRESHOLDS = [1.0, 0.95, 0.9, 0.8, 0.7]
BATCH_SIZE = 24
MAX_NEW_TOKENS = 64

Score = dict[str, float]
Scores = dict[Setting, Score]
Runs = dict[Setting, Run]

console = Console()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("mars-quickstart"), help="(default: mars-quickstart)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ar_steps", type=positive, default=300, help="optimizer steps of SFTTrainer (default: 300)")
    parser.add_argument("--mars_steps", type=positive, default=150, help="and of MarsSFTTrainer (default: 150)")
    parser.add_argument("--eval_examples", type=positive, default=200, help="unseen problems to answer (default: 200)")
    parser.add_argument("--timed_examples", type=positive, default=32, help="how many under the clock (default: 32)")
    parser.add_argument("--rounds", type=positive, default=3, help="passes under the clock (default: 3)")
    parser.add_argument("--hidden_size", type=positive, default=HIDDEN_SIZE, help=f"(default: {HIDDEN_SIZE})")
    parser.add_argument("--num_layers", type=positive, default=NUM_LAYERS, help=f"(default: {NUM_LAYERS})")
    parser.add_argument(
        "--fast", action="store_true", help="seconds instead of minutes, to see it run: learns nothing"
    )
    args = parser.parse_args()
    if args.fast:
        args.ar_steps = args.mars_steps = 2
        args.eval_examples, args.timed_examples, args.rounds = 8, 2, 1
    return args


def training_arguments(seed: int, warmup_steps: int) -> dict[str, Any]:
    """What the trainings of a small Llama have in common."""
    return {
        "per_device_train_batch_size": BATCH_SIZE,
        "lr_scheduler_type": "cosine",
        "warmup_steps": warmup_steps,
        "logging_steps": 25,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": seed,
    }


def train_both_stages(args: argparse.Namespace, problems: list[dict[str, str]]) -> tuple[SFTTrainer, MarsSFTTrainer]:
    """Ordinary SFT from random weights, then MARS from the checkpoint that it leaves."""
    tokenizer = train_tokenizer(problems)
    dataset = to_chat(problems)
    common = training_arguments(args.seed, warmup_steps=30)
    ar_dir = str(args.output_dir / "ar-sft")

    console.rule("Stage 1: SFTTrainer")
    model = make_model(tokenizer, args.hidden_size, args.num_layers)
    console.print(f"A Llama of {model.num_parameters():,} parameters, {len(problems):,} problems.")
    ar_trainer = SFTTrainer(
        model,
        args=SFTConfig(ar_dir, max_steps=args.ar_steps, learning_rate=1e-3, **common),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    ar_trainer.train()
    ar_trainer.save_model()

    console.rule("Stage 2: MarsSFTTrainer")
    mars_trainer = MarsSFTTrainer(
        ar_dir,
        args=MarsSFTConfig(
            str(args.output_dir),
            mars_block_size=4,
            # A reply is decoded from wherever the last step ended, so [MASK]s are taught at any place.
            mars_block_offset="random",
            max_steps=args.mars_steps,
            learning_rate=1e-3,
            **common,
        ),
        train_dataset=dataset,
    )
    mars_trainer.train()
    mars_trainer.save_model()
    mars_trainer.save_state()
    return ar_trainer, mars_trainer


def score(tokenizer: PreTrainedTokenizerBase, run: Run, problems: list[dict[str, str]]) -> Score:
    replies = tokenizer.batch_decode(run.tokens, skip_special_tokens=True)
    return FinalAnswer().compute(predictions=replies, references=[problem["answer"] for problem in problems])


def to_table(ar_score: Score, scores: Scores, single: Runs, batched: Runs) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, title="Unseen problems (x: multiple of stock tokens/s)")
    table.add_column("checkpoint,\nthreshold", no_wrap=True)
    for heading in ("\naccuracy", "95%\ninterval", "tokens/\nforward", "batch 1\ntokens/s", "\nx"):
        table.add_column(heading, justify="right")
    for heading in ("batch 8\ntokens/s", "\nx"):
        table.add_column(heading, justify="right")

    def right_answers(score: Score) -> list[str]:
        return [f"{score['accuracy']:.1%}", f"{score['low']:.0%}-{score['high']:.0%}"]

    table.add_row("AR SFT, stock", *right_answers(ar_score), end_section=True)
    for threshold, own_score in scores.items():
        cells = [*right_answers(own_score), f"{single[threshold].tokens_per_forward:.2f}"]
        for runs in (single, batched):
            cells += [f"{runs[threshold].tokens_per_second:.0f}", f"{runs[threshold].speedup(runs[None]):.2f}"]
        table.add_row("MARS, " + ("stock" if threshold is None else str(threshold)), *cells)
    return table


def draw(path: Path, ar_score: Score, scores: Scores, single: Runs, batched: Runs) -> None:
    """The trade-off, against the threshold: what it costs on the left, what it gains on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    mars = [scores[threshold] for threshold in THRESHOLDS]
    values = [score["accuracy"] for score in mars]
    spread = [[s["accuracy"] - s["low"] for s in mars], [s["high"] - s["accuracy"] for s in mars]]
    left.errorbar(THRESHOLDS, values, spread, marker="o", capsize=3, label="MARS, with 95% interval")
    left.axhline(ar_score["accuracy"], color="grey", linestyle="--", label="AR SFT, before MARS")
    left.set(title="What it costs", ylabel="share of right answers")
    right.plot(THRESHOLDS, [single[t].tokens_per_forward for t in THRESHOLDS], marker="o", label="tokens per forward")
    for name, runs in (("batch 1", single), ("batch 8", batched)):
        speeds = [runs[threshold].speedup(runs[None]) for threshold in THRESHOLDS]
        right.plot(THRESHOLDS, speeds, marker="s", label=f"tokens/s, {name}")
    right.axhline(1, color="grey", linestyle="--", label="stock generate")
    right.set(title="What it gains", ylabel="multiple of stock generate", ylim=(0, None))
    for axes in (left, right):
        axes.set(xlabel="mars_threshold (1.0 is plain AR)", xticks=THRESHOLDS)
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
        # Below the axes, where no bar can be covered.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    matplotlib.use("Agg")
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    set_seed(args.seed)
    problems = make_problems(args.eval_examples + BATCH_SIZE * args.ar_steps, args.seed)
    unseen = problems[: args.eval_examples]
    ar_trainer, mars_trainer = train_both_stages(args, problems[args.eval_examples :])

    console.rule("Stage 3: generate")
    tokenizer = mars_trainer.processing_class
    questions = [problem["question"] for problem in unseen]
    timed = questions[: args.timed_examples]
    model = get_mars_model(mars_trainer.model.eval())
    before = measure(ar_trainer.model.eval(), tokenizer, questions, [], 50, MAX_NEW_TOKENS)[None]
    quality = measure(model, tokenizer, questions, THRESHOLDS, 50, MAX_NEW_TOKENS)
    single = measure(model, tokenizer, timed, THRESHOLDS, 1, MAX_NEW_TOKENS, args.rounds)
    batched = measure(model, tokenizer, timed, THRESHOLDS, 8, MAX_NEW_TOKENS, args.rounds)
    ar_score = score(tokenizer, before, unseen)
    scores = {threshold: score(tokenizer, run, unseen) for threshold, run in quality.items()}

    console.print(to_table(ar_score, scores, single, batched))
    for runs in (quality, single, batched):
        if runs[1.0].tokens != runs[None].tokens:
            raise RuntimeError("`mars_threshold=1.0` did not give the tokens of stock `generate`.")
    console.print("mars_threshold=1.0 gave the tokens of stock generate, one for one.")
    draw(args.output_dir / "tradeoff.png", ar_score, scores, single, batched)
    console.print(f"The checkpoint, its tokenizer and tradeoff.png are in {args.output_dir}. Try:")
    console.print(f'  python recipes/generate.py {args.output_dir} "{questions[0]}"', soft_wrap=True)


if __name__ == "__main__":
    main()
