"""Measure a MARS checkpoint on GSM8K, against stock `generate` of the same checkpoint in the same process.

    python recipes/evaluate_gsm8k.py path/or/repo --data gsm8k/test.jsonl --limit 100 --batch_size 1 8

Prints a Markdown table and writes it, with one JSON line per row, to `--output_dir`, after each batch size. A run that
was stopped goes on where it was when it is started again; one that ended starts anew. Any file of JSON lines with a
`question` and an `answer` that ends in `#### number` will do.
"""

import argparse
import json
from pathlib import Path

from _arguments import Distinct, positive, up_to_one
from _load import DTYPES, load_checkpoint
from _measure import UNFINISHED, FinalAnswer, measure, refuse_open_problems
from _problems import read_problems
from _store import Store, write_whole
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint: a folder or a name on the Hub")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with `question` and `answer`")
    parser.add_argument("--limit", type=positive, default=100, help="problems, from the first (default: 100)")
    parser.add_argument(
        "--batch_size", type=positive, nargs="+", action=Distinct, default=[1, 8], help="(default: 1 8)"
    )
    parser.add_argument(
        "--mars_threshold", type=up_to_one, nargs="+", action=Distinct, default=[1.0, 0.95, 0.9, 0.8, 0.7]
    )
    parser.add_argument("--max_new_tokens", type=positive, default=160, help="(default: 160)")
    parser.add_argument(
        "--rounds", type=positive, default=1, help="passes over the problems for the clock (default: 1)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--output_dir", type=Path, default=Path("mars-gsm8k"), help="(default: mars-gsm8k)")
    return parser.parse_args()


def evaluate_batch_size(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict],
    batch_size: int,
    args: argparse.Namespace,
    store: Store,
) -> list[dict]:
    """One row for stock `generate`, one for each threshold, and one for lossless decoding."""
    questions, answers = ([problem[key] for problem in problems] for key in ("question", "answer"))
    settings = [*args.mars_threshold, "lossless"]
    runs = measure(model, tokenizer, questions, settings, batch_size, args.max_new_tokens, args.rounds, store=store)
    metric, rows = FinalAnswer(), []
    for setting, run in runs.items():
        replies = tokenizer.batch_decode(run.tokens, skip_special_tokens=True)
        rows.append(
            {
                "batch_size": batch_size,
                "setting": setting,
                "tokens_per_forward": run.tokens_per_forward,
                "tokens_per_second": run.tokens_per_second,
                "speedup": run.speedup(runs[None]),
                **metric.compute(predictions=replies, references=answers),
                "same_as_stock": sum(map(list.__eq__, run.tokens, runs[None].tokens)) / len(problems),
            }
        )
    return rows


def to_markdown(rows: list[dict]) -> str:
    lines = [
        "| batch size | setting | tokens per forward | tokens/s | against stock | exact match (95%) | same text |",
        "| ---: | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        setting = "stock" if row["setting"] is None else str(row["setting"])
        lines.append(
            f"| {row['batch_size']} | {setting} | {row['tokens_per_forward']:.2f} | {row['tokens_per_second']:.1f} "
            f"| {row['speedup']:.2f} | {row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%}) "
            f"| {row['same_as_stock']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_args()
    problems = read_problems(args.data, args.limit, ("question", "answer"))
    refuse_open_problems(problems, args.data)
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    store = Store(args.output_dir / UNFINISHED)
    rows: list[dict] = []
    for batch_size in args.batch_size:
        rows += evaluate_batch_size(model, tokenizer, problems, batch_size, args, store)
        write_whole(args.output_dir / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_whole(args.output_dir / "results.md", to_markdown(rows))
    store.path.unlink()
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
