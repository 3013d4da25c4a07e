"""The tables and figures of the MARS paper (arXiv 2604.07023), each by one command, small here and large there.

    python recipes/paper.py main --scale tiny --seeds 3
    python recipes/paper.py all --scale tiny --seeds 3
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/paper.py main --scale full

`main` (the paper's Tables 2 and 4), `ablation` (Table 3), `batch` (Table 5), `sweep` (Table 15 and the quality-speed
curve), `confidence` (Figure 7), `cost` (training steps); `benchmarks` is in `paper_benchmarks.py`. At `--scale tiny` a
small Llama learns arithmetic from nothing, without network and GPU; at `--scale full` Qwen2.5 learns as in the paper.
Every field of `paper_settings.Scale` is an option, such as `--steps` or `--train_data FILE`.

A run that was stopped goes on where it was when it is started again: checkpoints and measurements are kept in
`--output_dir`, shared by all tables. There the table is written as Markdown and drawn, and `results.jsonl` has what
was measured, problem by problem.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from _arguments import positive
from _store import Store, write_whole
from accelerate import PartialState
from paper_measure import Bench
from paper_plots import draw_ablation, draw_batch, draw_cost, draw_curves, draw_main
from paper_settings import (
    ABLATION,
    BATCH_SIZES,
    BLOCK_SIZES,
    CONFIDENCE,
    COST,
    MAIN,
    SCALES,
    SWEEP,
    SYSTEMS,
    Row,
    Scale,
)
from paper_systems import Lab
from paper_tables import REFERENCE, Measured, ablation_table, batch_table, cost_table, label, rows_table
from transformers.utils import logging

ALIASES = {
    "table2": "main",
    "table4": "main",
    "table3": "ablation",
    "table5": "batch",
    "table15": "sweep",
    "figure7": "confidence",
}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, *ALIASES, "all"])
    parser.add_argument("--scale", choices=list(SCALES), default="tiny", help="(default: tiny)")
    parser.add_argument("--seeds", type=positive, default=1, help="how many, from 0 (default: 1)")
    parser.add_argument("--output_dir", type=Path, help="(default: mars-paper-SCALE)")
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="SYSTEM=PATH",
        help="a checkpoint that is ready; systems: " + ", ".join(SYSTEMS),
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="(default: all)")
    kinds: dict[str, Callable[[str], Any]] = {"str": str, "int": positive, "float": float, "int | None": positive}
    for option in dataclasses.fields(Scale):
        parser.add_argument(f"--{option.name}", type=kinds[str(option.type)], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.table = ALIASES.get(args.table, args.table)
    args.output_dir = args.output_dir or Path(f"mars-paper-{args.scale}")
    given = {
        option.name: getattr(args, option.name)
        for option in dataclasses.fields(Scale)
        if getattr(args, option.name) is not None
    }
    args.settings = dataclasses.replace(SCALES[args.scale], **given)
    for pair in args.checkpoint:
        system, _, path = pair.partition("=")
        if system not in SYSTEMS:
            parser.error(f"--checkpoint {pair}: there is no such system")
        if not path:
            parser.error(f"--checkpoint {pair}: say where it is, SYSTEM=PATH")
    args.given = dict(pair.split("=", 1) for pair in args.checkpoint)
    needed = {table: systems_of(table, args.systems) for table in (TABLES if args.table == "all" else [args.table])}
    args.tables = {table: systems for table, systems in needed.items() if systems}
    if not args.tables:
        parser.error(f"the table {args.table} has no row of --systems {' '.join(args.systems)}")
    return args


def measure(bench: Bench, rows: list[Row], seeds: int) -> Measured:
    """The records of every row and seed; one of seed 0 for a checkpoint that is given, which is one training."""
    measured: Measured = {row: [] for row in rows if row.system in bench.systems}
    # Seed by seed, so that the first of them is whole early.
    for seed in range(seeds):
        for row, records in measured.items():
            if seed == 0 or row.system not in bench.lab.given:
                records.append(bench.row(row, seed))
    return measured


def run_main(bench: Bench, seeds: int, stem: Path) -> str:
    measured = measure(bench, MAIN, seeds)
    draw_main(stem.with_suffix(".png"), measured)
    return rows_table(measured)


def run_ablation(bench: Bench, seeds: int, stem: Path) -> str:
    measured = measure(bench, ABLATION, seeds)
    draw_ablation(stem.with_suffix(".png"), measured, BLOCK_SIZES)
    logs = {
        row.system: [bench.lab.last_log(row.system, seed) for seed in range(len(measured[row]))] for row in measured
    }
    next_token = {
        name: [float(log["mean_token_accuracy"]) for log in entries] for name, entries in logs.items() if all(entries)
    }
    return ablation_table(measured, next_token)


def run_sweep(bench: Bench, seeds: int, stem: Path) -> str:
    measured = measure(bench, SWEEP, seeds)
    groups: dict[str, list[Row]] = {}
    for row in SWEEP:
        if row in measured and row != REFERENCE:
            groups.setdefault(label(row), []).append(row)
    draw_curves(stem.with_suffix(".png"), measured, groups)
    return rows_table(measured)


def run_confidence(bench: Bench, seeds: int, stem: Path) -> str:
    measured = measure(bench, CONFIDENCE, seeds)
    groups: dict[str, list[Row]] = {}
    for row in CONFIDENCE:
        if row in measured and row != REFERENCE:
            groups.setdefault(row.decoding.confidence, []).append(row)
    draw_curves(stem.with_suffix(".png"), measured, groups)
    return rows_table(measured)


def run_batch(bench: Bench, seeds: int, stem: Path) -> str:
    """The clock does not depend on the seed: one is enough."""
    records = [bench.batches("mars-b4", 0, size) for size in BATCH_SIZES]
    draw_batch(stem.with_suffix(".png"), records)
    return batch_table(records)


def run_cost(bench: Bench, seeds: int, stem: Path) -> str:
    # Whatever is timed is set against the reference, which costs no training.
    record = bench.costs(tuple(name for name in COST if name == REFERENCE.system or name in bench.systems), 0)
    draw_cost(stem.with_suffix(".png"), record)
    return cost_table(record)


TABLES: dict[str, Callable[[Bench, int, Path], str]] = {
    "main": run_main,
    "ablation": run_ablation,
    "sweep": run_sweep,
    "confidence": run_confidence,
    "batch": run_batch,
    "cost": run_cost,
}


def systems_of(table: str, wanted: list[str]) -> list[str]:
    """What a table needs trained; nothing if it has no row of the wanted systems."""
    if table == "cost":
        return ["ar"] if set(COST) & set(wanted) else []
    rows = {"main": MAIN, "ablation": ABLATION, "sweep": SWEEP, "confidence": CONFIDENCE, "batch": [Row("mars-b4")]}
    names = [name for name in dict.fromkeys(row.system for row in rows[table]) if name in wanted]
    return names + (["draft"] if table == "main" and REFERENCE.system in names else [])


def train(lab: Lab, table: str, systems: list[str], seeds: int) -> None:
    """Train what a table needs and what is not there yet."""
    for seed in range(1 if table in ("batch", "cost") else seeds):
        for name in systems:
            lab.checkpoint(name, seed)


def main() -> None:
    args = parse_args()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    state = PartialState(cpu=not torch.cuda.is_available())  # as the trainers have it
    is_main = state.is_main_process
    lab = Lab(args.settings, args.output_dir, args.given, lambda line: print(line, flush=True) if is_main else None)
    lab.problems(0)  # says what is wrong with them before hours of training
    if state.num_processes > 1:
        # Every process of a launcher trains, and one of them measures, for longer than the others could wait.
        if args.tables.pop("cost", None):
            lab.say("The table cost is left out: it times the steps of one process. Start it without a launcher.")
        if not args.tables:
            raise SystemExit(2)
        for table, systems in args.tables.items():
            train(lab, table, systems, args.seeds)
        if not is_main:
            return
    for table, systems in args.tables.items():
        train(lab, table, systems, args.seeds)
        bench = Bench(lab, Store(args.output_dir / "results.jsonl"), args.systems)
        text = TABLES[table](bench, args.seeds, args.output_dir / table)
        write_whole(args.output_dir / f"{table}.md", text)
        print(text)


if __name__ == "__main__":
    main()
