"""The pictures of the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from _store import Record
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import ScalarFormatter
from paper_settings import SYSTEMS, Row, mars
from paper_tables import (
    REFERENCE,
    Figure,
    Measured,
    accuracy,
    ar_signal,
    label,
    speedup,
    step_cost,
    tokens_per_forward,
    way,
)

ERRORS: dict[str, Any] = {"capsize": 2, "linewidth": 1, "markersize": 4}


def draw_points(axes: Axes, names: list[str], figures: list[Figure]) -> None:
    """One figure per line with its interval, the first on top."""
    for place, figure in enumerate(figures):
        axes.errorbar(figure.value, place, xerr=figure.error, fmt="o", color="C0", **ERRORS)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def draw_main(path: Path, measured: Measured) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    names = [f"{label(row)}: {way(row.decoding)}" for row in measured]
    draw_points(left, names, [accuracy(records) for records in measured.values()])
    draw_points(right, names, [tokens_per_forward(records) for records in measured.values()])
    if REFERENCE in measured:
        left.axvline(accuracy(measured[REFERENCE]).value, color="grey", linestyle="--", linewidth=1)
    left.set(xlabel="exact match", title="Quality")
    right.set(xlabel="tokens per forward", title="Speed")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(ScalarFormatter())
    right.invert_yaxis()  # shared with the left one, which was turned already
    save(figure, path)


def draw_curves(path: Path, measured: Measured, groups: dict[str, list[Row]]) -> None:
    """Quality against speed, a curve per group, and speed against the threshold."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, (name, rows) in enumerate(groups.items()):
        quality = [accuracy(measured[row]) for row in rows]
        speed = [tokens_per_forward(measured[row]) for row in rows]
        places = [row.decoding.threshold for row in rows]
        color = f"C{number}"
        for axes, x, y in ((left, [s.value for s in speed], quality), (right, places, speed)):
            errors = [[y_.error[side][0] for y_ in y] for side in (0, 1)]
            axes.errorbar(x, [y_.value for y_ in y], errors, marker="o", color=color, label=name, **ERRORS)
    mark_reference(left, measured)
    left.set(xlabel="tokens per forward", ylabel="exact match", title="Quality and speed")
    # Shares are never negative, also where all of them are 0.
    left.set_ylim(bottom=max(left.get_ylim()[0], -0.02))
    right.set(xlabel="threshold", ylabel="tokens per forward", title="What the threshold does")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save(figure, path)


def draw_ablation(path: Path, measured: Measured, block_sizes: tuple[int, ...]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for number, name in enumerate(("mars", "mars-nosft")):
        systems = [f"{name}-b{size}" for size in block_sizes]
        if any(Row(system, mars(tau)) not in measured for system in systems for tau in (1.0, 0.95)):
            continue
        has_ar_loss = SYSTEMS[systems[0]].ar_weight > 0
        for panel, tau in ((axes[0], 1.0), (axes[1], 0.95)):
            figures = [accuracy(measured[Row(system, mars(tau))]) for system in systems]
            errors = [[f.error[side][0] for f in figures] for side in (0, 1)]
            panel.errorbar(
                block_sizes,
                [f.value for f in figures],
                errors,
                marker="o",
                color=f"C{number}",
                label=SYSTEMS[systems[0]].label,
                **ERRORS,
            )
        signal = [ar_signal(size, has_ar_loss) for size in block_sizes]
        name = "(1 + 1/B) / 2" if has_ar_loss else "1 / B"
        axes[2].plot(block_sizes, signal, marker="o", color=f"C{number}", label=name)
    for panel, title in ((axes[0], "τ = 1"), (axes[1], "τ = 0.95")):
        mark_reference(panel, measured)
        panel.set(title=title, ylabel="exact match", ylim=(-0.05, 1.05))
    axes[2].set(title="Autoregressive share of the signal", ylim=(0, 1))
    for panel in axes:
        panel.set(xlabel="block size B", xticks=block_sizes)
        panel.grid(alpha=0.3)
    if axes[2].lines:
        axes[2].legend(fontsize="small")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    save(figure, path)


def draw_batch(path: Path, records: list[Record]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    names = [name for name in records[0]["seconds"] if name != "stock"]
    for number, name in enumerate(names):
        for place, record in enumerate(records):
            bar = speedup(record, name)
            x = place + (number - (len(names) - 1) / 2) * 0.2
            axes.bar(x, bar.value, 0.18, color=f"C{number}", label=cache_name(name) if place == 0 else None)
            axes.errorbar(x, bar.value, bar.error, color="black", capsize=2, linewidth=1)
    axes.axhline(1, color="grey", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(records)), [f"batch {record['batch_size']}" for record in records])
    axes.set(ylabel="tokens/s, multiple of stock generate", title="MARS, τ = 0.95, by cache")
    axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    save(figure, path)


def cache_name(key: str) -> str:
    return key.split("/")[2] if key.count("/") > 1 else "cursor"


def draw_cost(path: Path, record: Record) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = list(record["seconds"])
    draw_points(axes, [label(Row(name)) for name in names], [step_cost(record, n, names[0], "seconds") for n in names])
    for place, name in enumerate(names):
        axes.plot(step_cost(record, name, names[0], "tokens").value, place, "x", color="C1")
    axes.plot([], [], "o", color="C0", label="time")
    axes.plot([], [], "x", color="C1", label="tokens fed")
    axes.set(xlabel="a training step, multiple of AR SFT's", xlim=(0, None))
    axes.legend(loc="lower left")
    save(figure, path)


def mark_reference(axes: Axes, measured: Measured) -> None:
    """A line at the quality of AR SFT that was trained as long."""
    if REFERENCE in measured:
        value = accuracy(measured[REFERENCE]).value
        axes.axhline(value, color="grey", linestyle="--", linewidth=1, label="AR SFT, trained as long")


def save(figure: MplFigure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
