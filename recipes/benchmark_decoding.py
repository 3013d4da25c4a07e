"""How fast MARS decodes, against stock `generate` and prompt lookup of the same checkpoint, in the same process.

    python recipes/benchmark_decoding.py path/or/repo --data gsm8k/test.jsonl --batch_sizes 1 4 8 16

The settings take turns batch by batch and change places from round to round; figures are medians over the rounds. The
clock of a reply starts behind its first forward pass, which reads the prompt. *Efficiency* is how much of the possible
gain arrives: the ratio of tokens per second to stock, over the ratio that the forward passes alone would give, at the
cost c(q) of a cached forward of q tokens at that batch size, measured in the same run with the model as it is;
on a CPU it may be above 1, since MARS runs linear layers of few tokens in another way. Files go to `--output_dir`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from _arguments import Distinct, positive, up_to_one
from _load import DTYPES, as_batch, load_checkpoint
from _measure import GREEDY, follow, stop_ids, until_stop
from _problems import read_problems
from _turns import by_turns
from transformers import BatchEncoding, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

# Tokens per row at which c(q) is measured; between them it is interpolated.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 36)
KINDS: dict[str, dict[str, Any]] = {
    "none": {"mars_cache": "none"},
    "block 16": {"mars_cache": "block", "mars_cache_block_size": 16},
    "block 32": {"mars_cache": "block", "mars_cache_block_size": 32},
    "cursor": {},
    "adaptive": {"mars_adaptive_window": True},
}


@dataclass
class Run:
    """What one setting did, one entry per round; times in seconds.

    Attributes:
        tokens: new tokens behind the first of each row, up to the end of each reply.
        decoding, prefill: time behind and up to the end of the first forward pass.
        forwards: of the time in `decoding`, that in the model.
        widths: tokens per row of every forward but the first; of all batches of a round.
    """

    tokens: list[int] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    widths: list[list[int]] = field(default_factory=list)

    def speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.decoding, strict=True)]

    def ideal_speeds(self, costs: dict[int, float]) -> list[float]:
        """Tokens per second if a step cost what its forward costs, and nothing else."""
        seconds = [sum(np.interp(widths, list(costs), list(costs.values()))) for widths in self.widths]
        return [tokens / total for tokens, total in zip(self.tokens, seconds, strict=True)]

    def add(self, number: int, **values: Any) -> None:
        for name, value in values.items():
            entries = getattr(self, name)
            if len(entries) == number:
                entries.append(value)
            else:
                entries[number] = entries[number] + value


class Stopwatch:
    """Sees the model's forward passes: when the first one ended, how wide the others were and how long they took."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.on_gpu = model.device.type == "cuda"
        self.hooks = (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        )
        self.reset()

    def reset(self) -> None:
        self.widths: list[int] = []
        self.forwards = 0.0
        self.first_end: float | None = None

    def _begin(self, _: Any, args: Any, kwargs: Any) -> None:
        if self.first_end is not None:
            self.widths.append(kwargs["input_ids"].shape[1])
        self.begin = time.perf_counter()

    def _end(self, *_: Any) -> None:
        # A loop waits for each step anyway, here where what it waits for is the forward's time.
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.first_end is None:
            self.first_end = now
        else:
            self.forwards += now - self.begin

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def make_settings(args: argparse.Namespace, batch_size: int) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {"stock": {}}
    if batch_size == 1 and "prompt lookup" in args.settings:
        settings["prompt lookup"] = {"prompt_lookup_num_tokens": 10}
    for threshold in args.threshold:
        for kind in args.settings:
            if kind in KINDS:
                settings[f"{kind}, {threshold}"] = {"mars_threshold": threshold, **KINDS[kind]}
    return settings


def make_batches(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], batch_size: int, device: torch.device
) -> list[BatchEncoding]:
    """Chats padded on the left, whole batches only."""
    return [
        as_batch(tokenizer, questions[i : i + batch_size]).to(device)
        for i in range(0, len(questions) - batch_size + 1, batch_size)
    ]


@torch.no_grad()
def forward_costs(model: PreTrainedModel, batch: BatchEncoding, new_tokens: int, rounds: int) -> dict[int, float]:
    """c(q): median seconds of a forward of q tokens per row, behind the prompts and half of the replies."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    half = ids[:, -1:].expand(-1, new_tokens // 2)
    text, seen = torch.cat([ids, half], dim=-1), torch.cat([mask, torch.ones_like(half)], dim=-1)
    cache = DynamicCache(config=model.config)
    model(text, attention_mask=seen, cache=cache, logits_to_keep=1)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for number in range(rounds + 1):
        for width in WIDTHS:
            more = ids[:, -1:].expand(-1, width)
            begin = time.perf_counter()
            model(more, attention_mask=torch.cat([seen, torch.ones_like(more)], dim=-1), cache=cache)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first round pays for what later ones find ready
                times[width].append(time.perf_counter() - begin)
            cache.crop(-width)
    return {width: median(seconds) for width, seconds in times.items()}


def measure(
    model: PreTrainedModel,
    batches: list[BatchEncoding],
    settings: dict[str, dict[str, Any]],
    new_tokens: int,
    rounds: int,
) -> dict[str, Run]:
    """Run every setting on every batch, in turns."""
    watch, stops = Stopwatch(model), stop_ids(model)
    runs = {name: Run() for name in settings}
    jobs = [
        (number, batch, name)
        for number in range(-1, rounds)  # the first round is not counted
        for batch in (batches if number >= 0 else batches[:1])
        for name in by_turns(list(settings), number)
    ]
    for number, batch, name in follow(jobs, f"batch size {len(batches[0]['input_ids'])}, {new_tokens} new tokens"):
        watch.reset()
        begin = time.perf_counter()
        sequences = model.generate(**batch, **GREEDY, **settings[name], max_new_tokens=new_tokens).tolist()
        end = time.perf_counter()
        assert watch.first_end is not None
        tokens = [len(until_stop(row[batch["input_ids"].shape[1] :], stops)) - 1 for row in sequences]
        if number >= 0:
            runs[name].add(
                number,
                tokens=sum(tokens),
                decoding=end - watch.first_end,
                prefill=watch.first_end - begin,
                forwards=watch.forwards,
                widths=watch.widths,
            )
    watch.remove()
    return runs


def to_rows(runs: dict[str, Run], costs: dict[int, float], batch_size: int, new_tokens: int) -> list[dict[str, Any]]:
    stock = runs["stock"]
    rows = []
    for name, run in runs.items():
        ratio = median(own / other for own, other in zip(run.speeds(), stock.speeds(), strict=True))
        ideal = median(
            own / other for own, other in zip(run.ideal_speeds(costs), stock.ideal_speeds(costs), strict=True)
        )
        steps = [len(widths) for widths in run.widths]
        outside = median(
            (seconds - forwards) / max(count, 1)
            for seconds, forwards, count in zip(run.decoding, run.forwards, steps, strict=True)
        )
        rows.append(
            {
                "batch_size": batch_size,
                "new_tokens": new_tokens,
                "setting": name,
                "tokens_per_forward": median(t / max(s, 1) for t, s in zip(run.tokens, steps, strict=True))
                / batch_size,
                "tokens_per_second": median(run.speeds()),
                "speedup": ratio,
                # Without a cache a forward is as wide as the text: nothing that c(q) says.
                "efficiency": None if name.startswith("none") else ratio / ideal,
                "mean_width": mean(width for widths in run.widths for width in widths),
                "outside_ms": 1000 * outside,
                "prefill_seconds": median(run.prefill),
            }
        )
    return rows


def to_markdown(rows: list[dict[str, Any]], costs: dict[int, dict[int, float]]) -> str:
    lines = [
        "| batch | new tokens | setting | tokens / row / forward | tokens/s | against stock | efficiency "
        "| outside the forward, ms | prefill, s |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
        verdict = " slower" if row["speedup"] < 1 else ""
        lines.append(
            f"| {row['batch_size']} | {row['new_tokens']} | {row['setting']} | {row['tokens_per_forward']:.2f} "
            f"| {row['tokens_per_second']:.1f} | {row['speedup']:.2f}{verdict} | {efficiency} "
            f"| {row['outside_ms']:.2f} | {row['prefill_seconds']:.2f} |"
        )
    lines += ["", f"| batch | {' | '.join(f'c({width})' for width in WIDTHS)} |", f"|{' ---: |' * (len(WIDTHS) + 1)}"]
    for batch_size, curve in costs.items():
        relative = " | ".join(f"{curve[width] / curve[1]:.2f}" for width in WIDTHS)
        lines.append(f"| {batch_size} (c(1) = {1000 * curve[1]:.1f} ms) | {relative} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The speed of every setting against stock, by batch size, one picture per length of reply."""
    matplotlib.use("Agg")
    lengths = sorted({row["new_tokens"] for row in rows})
    figure, all_axes = plt.subplots(
        1, len(lengths), figsize=(6 * len(lengths), 4), layout="constrained", squeeze=False
    )
    for axes, length in zip(all_axes[0], lengths, strict=True):
        here = [row for row in rows if row["new_tokens"] == length and row["setting"] != "stock"]
        for name in dict.fromkeys(row["setting"] for row in here):
            points = [(row["batch_size"], row["speedup"]) for row in here if row["setting"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.axhline(1, color="grey", linestyle="--", label="stock generate")
        axes.set(title=f"{length} new tokens", xlabel="batch size", ylabel="multiple of stock", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes := sorted({row["batch_size"] for row in rows}), [str(size) for size in sizes])
        axes.grid(alpha=0.3)
    all_axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a MARS checkpoint: a folder or a name on the Hub")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a `question`")
    parser.add_argument("--limit", type=positive, default=16, help="prompts, from the first (default: 16)")
    parser.add_argument(
        "--batch_sizes", type=positive, nargs="+", action=Distinct, default=[1, 4, 8, 16], help="(default: 1 4 8 16)"
    )
    parser.add_argument(
        "--max_new_tokens", type=positive, nargs="+", action=Distinct, default=[160, 24], help="(default: 160 24)"
    )
    parser.add_argument(
        "--threshold", type=up_to_one, nargs="+", action=Distinct, default=[0.95], help="(default: 0.95)"
    )
    parser.add_argument(
        "--settings", nargs="+", choices=["prompt lookup", *KINDS], default=["prompt lookup", *KINDS], metavar="NAME",
        help=f"what to compare with stock, of: prompt lookup, {', '.join(KINDS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, help="(default: 3)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--output_dir", type=Path, default=Path("mars-decoding"), help="(default: mars-decoding)")
    args = parser.parse_args()
    if min(args.max_new_tokens) < 2:
        parser.error("the clock starts behind the first new token: set --max_new_tokens to 2 at least")
    return args


def main() -> None:
    args = parse_args()
    questions = [problem["question"] for problem in read_problems(args.data, args.limit)]
    if len(questions) < max(args.batch_sizes):
        raise SystemExit(f"{len(questions)} prompts do not fill a batch of {max(args.batch_sizes)}: raise --limit.")
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    rows: list[dict[str, Any]] = []
    costs: dict[int, dict[int, float]] = {}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for batch_size in args.batch_sizes:
        batches = make_batches(tokenizer, questions, batch_size, model.device)
        costs[batch_size] = forward_costs(model, batches[0], max(args.max_new_tokens), 3 * args.rounds)
        for new_tokens in args.max_new_tokens:
            runs = measure(model, batches, make_settings(args, batch_size), new_tokens, args.rounds)
            rows += to_rows(runs, costs[batch_size], batch_size, new_tokens)
        # After every batch size, so that a run that is cut short keeps what it has measured.
        table = to_markdown(rows, costs)
        (args.output_dir / "decoding.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (args.output_dir / "decoding.md").write_text(table)
        draw(rows, args.output_dir / "decoding.png")
    print(table)


if __name__ == "__main__":
    main()
