"""Lossless decoding against stock `generate` and stock prompt lookup, and against the curve of the threshold.

    python recipes/lossless.py path/or/repo --data gsm8k/test.jsonl --limit 100 --batch_size 1 8

All settings take turns in one process. Prints a Markdown table and writes it to `--output_dir`, with the figures as
JSON and a plot of quality against speed, after each batch size. A run that was stopped goes on where it was when it is
started again; one that ended starts anew. Any file of JSON lines with a `question` will do; where each has an `answer`
that ends in `#### number`, right answers are counted too. For every text that is not that of stock `generate`, table
and JSON say how far apart the two likeliest tokens were in stock's own logits where the texts part.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from _arguments import Distinct, positive, up_to_one
from _load import DTYPES, as_batch, load_checkpoint
from _measure import GREEDY, UNFINISHED, FinalAnswer, Run, Setting, has_final_answer, measure
from _problems import read_problems
from _store import Store, write_whole
from transformers import PreTrainedModel, PreTrainedTokenizerBase

STOCK_LOOKUP = "prompt lookup"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint: a folder or a name on the Hub")
    parser.add_argument(
        "--data", type=Path, required=True, help="JSON lines with `question`, and `answer` if there is"
    )
    parser.add_argument("--limit", type=positive, default=100, help="prompts, from the first (default: 100)")
    parser.add_argument(
        "--batch_size", type=positive, nargs="+", action=Distinct, default=[1, 8], help="(default: 1 8)"
    )
    parser.add_argument("--mars_draft_length", type=positive, nargs="+", default=[3, 4], help="(default: 3 4)")
    parser.add_argument("--prompt_lookup_num_tokens", type=positive, default=10, help="(default: 10)")
    parser.add_argument("--max_matching_ngram_size", type=positive, default=2, help="(default: 2)")
    parser.add_argument(
        "--mars_tree_budget",
        type=lambda text: text if text == "auto" else positive(text),
        nargs="*",
        default=[16],
        help="numbers or auto, for both sources (default: 16)",
    )
    parser.add_argument(
        "--mars_draft_choices", type=positive, nargs="+", default=[1], help="for the budgets (default: 1)"
    )
    parser.add_argument("--mars_threshold", type=up_to_one, nargs="*", action=Distinct, default=[0.95, 0.9, 0.8, 0.7])
    parser.add_argument("--max_new_tokens", type=positive, default=160, help="(default: 160)")
    parser.add_argument(
        "--rounds", type=positive, default=1, help="passes over the prompts for the clock (default: 1)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--output_dir", type=Path, default=Path("mars-lossless"), help="(default: mars-lossless)")
    return parser.parse_args()


def make_settings(args: argparse.Namespace, batch_size: int) -> dict[str, dict[str, Any]]:
    """The arguments of `generate` of every setting but stock and the thresholds, by what the table calls it."""
    lookup = {
        "prompt_lookup_num_tokens": args.prompt_lookup_num_tokens,
        "max_matching_ngram_size": args.max_matching_ngram_size,
    }
    settings: dict[str, dict[str, Any]] = {}
    if batch_size == 1:
        settings[STOCK_LOOKUP] = lookup
    for length in args.mars_draft_length:
        lossless = {"mars_lossless": True, "mars_draft_length": length}
        both = lossless | lookup
        settings[f"lossless, {length} drafts"] = lossless
        settings[f"lossless, {length} drafts and lookup"] = both
        for budget in args.mars_tree_budget:
            for choices in args.mars_draft_choices:
                name = f"lossless, {length} drafts and lookup, budget {budget}"
                bounded = both | {"mars_tree_budget": budget}
                if choices > 1:
                    name += f", {choices} choices"
                    bounded["mars_draft_choices"] = choices
                settings[name] = bounded
    return settings


def evaluate_batch_size(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict],
    batch_size: int,
    args: argparse.Namespace,
    store: Store,
) -> list[dict]:
    """One row for stock `generate`, and one for each setting."""
    questions = [problem["question"] for problem in problems]
    named = make_settings(args, batch_size)
    settings: list[Setting] = [*named, *args.mars_threshold]
    runs = measure(model, tokenizer, questions, settings, batch_size, args.max_new_tokens, args.rounds, named, store)
    rows = []
    stock_logits = StockLogits(model, tokenizer, questions, batch_size, max(map(len, runs[None].tokens)))
    for setting, run in runs.items():
        row: dict[str, Any] = {
            "batch_size": batch_size,
            "setting": "stock" if setting is None else setting,
            "tokens_per_forward": run.tokens_per_forward,
            "tokens_per_second": run.tokens_per_second,
            "against_stock": run.speedup(runs[None]),
            "against_prompt_lookup": run.speedup(runs[STOCK_LOOKUP]) if STOCK_LOOKUP in runs else None,
            "same_text": sum(map(list.__eq__, run.tokens, runs[None].tokens)) / len(questions),
        }
        if all(map(has_final_answer, problems)):
            replies = tokenizer.batch_decode(run.tokens, skip_special_tokens=True)
            row.update(FinalAnswer().compute(predictions=replies, references=[p["answer"] for p in problems]))
        if isinstance(setting, str):
            row["differences"] = find_differences(stock_logits, runs[None], run)
        rows.append(row)
    return rows


class StockLogits:
    """The two best logits behind every token of stock `generate`, of batches that are asked about."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        questions: list[str],
        batch_size: int,
        max_new_tokens: int,
    ) -> None:
        self.model, self.tokenizer, self.questions = model, tokenizer, questions
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.known: dict[int, torch.Tensor] = {}

    def best_two(self, prompt: int, place: int) -> tuple[float, float]:
        """Of the new token at this place of the answer to a prompt."""
        number, row = divmod(prompt, self.batch_size)
        if number not in self.known:
            first = number * self.batch_size
            batch = as_batch(self.tokenizer, self.questions[first : first + self.batch_size]).to(self.model.device)
            options = {"return_dict_in_generate": True, "output_logits": True}
            output = self.model.generate(**batch, **GREEDY, max_new_tokens=self.max_new_tokens, **options)
            self.known[number] = torch.stack([logits.float().topk(2).values for logits in output.logits]).cpu()
        best, second = self.known[number][place, row].tolist()
        return best, second


def find_differences(stock_logits: StockLogits, stock: Run, run: Run) -> list[dict[str, Any]]:
    """Where texts part from stock's: the prompt, the new token, and the gap between the two best of stock's logits.

    `spacing` is the distance between neighbouring numbers of the model's format, as large as the best logit is.
    """
    differences = []
    for prompt, (theirs, ours) in enumerate(zip(stock.tokens, run.tokens, strict=True)):
        if theirs == ours:
            continue
        place = next(i for i in range(len(theirs)) if theirs[: i + 1] != ours[: i + 1])
        best, second = stock_logits.best_two(prompt, place)
        spacing = torch.finfo(stock_logits.model.dtype).eps * 2 ** math.floor(math.log2(max(abs(best), 1e-30)))
        differences.append({"prompt": prompt, "token": place, "gap": best - second, "spacing": spacing})
    return differences


def to_markdown(rows: list[dict]) -> str:
    lines = [
        "| batch size | setting | tokens per forward | tokens/s | against stock | against prompt lookup | same text "
        "| widest gap where texts part |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lookup = "" if row["against_prompt_lookup"] is None else f"{row['against_prompt_lookup']:.2f}"
        gap = max((d["gap"] for d in row.get("differences", [])), default=None)
        lines.append(
            f"| {row['batch_size']} | {row['setting']} | {row['tokens_per_forward']:.2f} "
            f"| {row['tokens_per_second']:.1f} | {row['against_stock']:.2f} | {lookup} | {row['same_text']:.0%} "
            f"| {'' if gap is None else f'{gap:.4f}'} |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: list[dict]) -> None:
    """Quality against speed for each batch size: the curve of the threshold, and the points of lossless decoding."""
    qualities = {"same_text": "share of texts that are stock's"}
    # Where no answer is right, since replies are cut say, there is nothing to see.
    if any(row.get("accuracy") for row in rows):
        qualities = {"accuracy": "share of right answers"} | qualities
    sizes = sorted({row["batch_size"] for row in rows})
    shape = (len(sizes), len(qualities))
    figure, grid = plt.subplots(*shape, figsize=(6.5 * shape[1], 5 * shape[0]), layout="constrained", squeeze=False)
    for size, line in zip(sizes, grid, strict=True):
        of_size = [row for row in rows if row["batch_size"] == size]
        curve = [row for row in of_size if isinstance(row["setting"], float) or row["setting"] == "stock"]
        points = [row for row in of_size if row not in curve]
        for (key, label), axes in zip(qualities.items(), line, strict=True):
            speeds = [row["against_stock"] for row in curve]
            axes.plot(speeds, [row[key] for row in curve], marker="o", color="black", label="mars_threshold")
            for row in curve:
                point = row["against_stock"], row[key]
                axes.annotate(str(row["setting"]), point, (5, -10), textcoords="offset points", fontsize=7)
            for row in points:
                marker = "^" if row["setting"] == STOCK_LOOKUP else "s"
                axes.plot(row["against_stock"], row[key], marker=marker, linestyle="", label=row["setting"])
            axes.set(xlabel="tokens/s, multiple of stock generate", ylabel=label, title=f"batch {size}")
            axes.grid(alpha=0.3)
            # Shares begin at 0, also where all of them are.
            axes.set_ylim(bottom=max(axes.get_ylim()[0], -0.02))
        # Below the axes, where no point can be covered.
        line[-1].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    args = parse_args()
    matplotlib.use("Agg")
    problems = read_problems(args.data, args.limit)
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    store = Store(args.output_dir / UNFINISHED)
    rows: list[dict] = []
    for batch_size in args.batch_size:
        rows += evaluate_batch_size(model, tokenizer, problems, batch_size, args, store)
        write_whole(args.output_dir / "results.json", json.dumps(rows, indent=1) + "\n")
        write_whole(args.output_dir / "results.md", to_markdown(rows))
        draw(args.output_dir / "lossless.png", rows)
    store.path.unlink()
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
