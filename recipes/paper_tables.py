"""From records to Markdown tables, with an interval on every figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from _store import Record
from paper_settings import SYSTEMS, Decoding, Row

from mars_hf.metrics import bootstrap_interval

REFERENCE = Row("ar-twice")
# Drawing two seeds anew says nothing about seeds; the interval is then about the problems alone.
MIN_SEEDS = 3

Measured = dict[Row, list[Record]]


class Figure(NamedTuple):
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float

    def text(self, style: str = ".1%") -> str:
        return f"{self.value:{style}} ({self.low:{style}} to {self.high:{style}})"

    @property
    def error(self) -> tuple[list[float], list[float]]:
        """Distances to both ends, as matplotlib takes them."""
        return [max(0.0, self.value - self.low)], [max(0.0, self.high - self.value)]


def ratio_of_sums(values: Sequence[float], weights: Sequence[float], seeds: Sequence[int]) -> Figure:
    """Sum over sum, with an interval over problems, and over seeds where there are enough."""
    groups = seeds if len(set(seeds)) >= MIN_SEEDS else None
    low, high = bootstrap_interval(values, weights, groups=groups)
    return Figure(float(np.sum(values) / np.sum(weights)), low, high)


def pooled(records: list[Record], field: str) -> tuple[list[float], list[int]]:
    """The values of all seeds, and the seed of each."""
    values = [value for record in records for value in record[field]]
    return values, [record["seed"] for record in records for _ in record[field]]


def accuracy(records: list[Record], field: str = "strict") -> Figure:
    values, seeds = pooled(records, field)
    return ratio_of_sums(values, [1.0] * len(values), seeds)


def tokens_per_forward(records: list[Record]) -> Figure:
    tokens, seeds = pooled(records, "tokens")
    return ratio_of_sums(tokens, pooled(records, "forwards")[0], seeds)


def agreement(records: list[Record]) -> Figure | None:
    if any("agreement" not in record for record in records):
        return None
    values, seeds = pooled(records, "agreement")
    return ratio_of_sums(values, [1.0] * len(values), seeds)


def difference(records: list[Record], others: list[Record], field: str = "strict") -> Figure:
    """Accuracy less that of other records, problem by problem, over the seeds that both have."""
    values, seeds = [], []
    by_seed = {record["seed"]: record for record in others}
    for own in records:
        if own["seed"] in by_seed:
            pairs = list(zip(own[field], by_seed[own["seed"]][field], strict=False))  # some answer the first few only
            values += [a - b for a, b in pairs]
            seeds += [own["seed"]] * len(pairs)
    return ratio_of_sums(values, [1.0] * len(values), seeds)


def way(decoding: Decoding) -> str:
    """How a row decodes, in words."""
    names = {
        "stock": "stock",
        "lossless": "lossless",
        "jacobi": "Jacobi",
        "prompt_lookup": "prompt lookup",
        # A draft's own forwards are not counted.
        "speculative": "speculative (target's)",
    }
    if decoding.method in names:
        return names[decoding.method]
    sign = "H ≤" if decoding.confidence == "entropy" else "margin" if decoding.confidence == "margin" else "τ ="
    return f"{sign} {decoding.threshold:g}"


def label(row: Row) -> str:
    system = SYSTEMS[row.system]
    return system.label + (f", B={system.block_size}" if system.block_size else "")


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def rows_table(measured: Measured) -> str:
    """Quality and speed of every row, and the difference to AR SFT that trained as long."""
    lines, reference = [], measured.get(REFERENCE)
    for row, records in measured.items():
        same = agreement(records)
        gap = "" if reference is None or row == REFERENCE else difference(records, reference).text("+.1%")
        lines.append(
            [
                label(row),
                way(row.decoding),
                accuracy(records).text(),
                gap,
                tokens_per_forward(records).text(".2f"),
                "" if same is None else same.text(),
                f"{len(records)} x {len(records[0]['strict'])}",
            ]
        )
    header = [
        "training",
        "decoding",
        "exact match",
        "against AR SFT",
        "tokens/forward",
        "agreement",
        "seeds x problems",
    ]
    return grid(header, lines)


def ablation_table(measured: Measured, next_token: dict[str, list[float]]) -> str:
    """Block sizes with and without SFT loss, beside the share of the training signal that is autoregressive.

    Args:
        next_token: by system, the next-token accuracy that each seed's training logged last.
    """
    lines, reference = [], measured.get(REFERENCE)
    for row, records in measured.items():
        if row == REFERENCE or row.decoding.threshold != 1.0:
            continue
        system = SYSTEMS[row.system]
        fast = measured[Row(row.system, Decoding("mars", 0.95))]
        signal = ar_signal(system.block_size, system.ar_weight > 0)
        lines.append(
            [
                system.label,
                str(system.block_size),
                f"{signal:.3f}",
                accuracy(records).text(),
                "" if reference is None else difference(records, reference).text("+.1%"),
                accuracy(fast).text(),
                tokens_per_forward(fast).text(".2f"),
                average(next_token.get(row.system, [])),
            ]
        )
    header = ["training", "B", "AR signal", "τ = 1", "against AR SFT", "τ = 0.95", "tokens/forward", "next token"]
    above = "" if reference is None else f"AR SFT, trained as long: {accuracy(reference).text()}\n\n"
    return above + grid(header, lines)


def average(values: Sequence[float]) -> str:
    """The mean over seeds and its interval, for what has one figure a seed."""
    if not values:
        return ""
    mean = Figure(float(np.mean(values)), *bootstrap_interval(values))
    return mean.text() if len(values) >= MIN_SEEDS else f"{mean.value:.1%}"


def ar_signal(block_size: int, has_ar_loss: bool) -> float:
    """Share of the loss's terms that are ordinary next-token prediction: 1/B, and (1 + 1/B)/2 with the SFT loss."""
    return (1 + 1 / block_size) / 2 if has_ar_loss else 1 / block_size


def speedup(record: Record, name: str, stock: str = "stock", resamples: int = 2000) -> Figure:
    """Tokens per second over those of stock `generate`, with an interval over the batches and rounds."""
    own, other = (np.array([record["seconds"][key], record["tokens"][key]]) for key in (name, stock))
    draws = np.random.default_rng(0).integers(own.shape[1], size=(resamples, own.shape[1]))

    def figure(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a[1].sum(-1) / a[0].sum(-1)) / (b[1].sum(-1) / b[0].sum(-1))

    low, high = np.quantile(figure(own[:, draws], other[:, draws]), [0.025, 0.975])
    return Figure(float(figure(own, other)), float(low), float(high))


def batch_table(records: list[Record]) -> str:
    lines = []
    for record in records:
        for name in record["seconds"]:
            rate = sum(record["tokens"][name]) / sum(record["seconds"][name])
            lines.append([str(record["batch_size"]), name, f"{rate:.0f}", speedup(record, name).text(".2f")])
    return grid(["batch size", "decoding, cache", "tokens/s", "x stock"], lines)


def step_cost(record: Record, name: str, reference: str, field: str) -> Figure:
    """Seconds, or tokens, of a step over those of the reference, with an interval over the steps."""
    own, other = record[field][name], record[field][reference]
    return ratio_of_sums(own, other, [0] * len(own))


def cost_table(record: Record) -> str:
    reference = next(iter(record["seconds"]))
    lines = [
        [
            label(Row(name)),
            f"{1000 * np.mean(record['seconds'][name]):.0f}",
            step_cost(record, name, reference, "seconds").text(".2f"),
            step_cost(record, name, reference, "tokens").text(".2f"),
        ]
        for name in record["seconds"]
    ]
    return grid(["training", "ms/step", "time, x AR SFT", "tokens fed, x AR SFT"], lines)
