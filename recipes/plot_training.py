"""Draw the curves of a training run from the `trainer_state.json` that it saved.

python recipes/plot_training.py path/to/output_dir --output training.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def draw(axes: Axes, log: list[dict], curves: dict[str, str], lowest: float = 0.0) -> None:
    """Draw each curve of `curves` (name in the log, label) that the log holds, above `lowest`."""
    for name, label in curves.items():
        points = [(entry["step"], float(entry[name])) for entry in log if name in entry]
        if points:
            # A line through a single point cannot be seen.
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) == 1 else "")
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
    if axes.lines:
        # Not on empty axes, whose own limits may be below it.
        axes.set_ylim(bottom=lowest)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, frameon=False, columnspacing=1.0)


def find_state(run: Path) -> Path:
    """The trainer's state: the file itself, that of the output folder, or that of its last checkpoint."""
    checkpoints = sorted(run.glob("checkpoint-[0-9]*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    for path in (run, run / "trainer_state.json", *(folder / "trainer_state.json" for folder in checkpoints[::-1])):
        if path.is_file():
            return path
    raise SystemExit(
        f"{run} holds no trainer_state.json. Call `trainer.save_state()` after training, or save checkpoints."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output_dir of the training, or a trainer_state.json")
    parser.add_argument("--output", type=Path, default=Path("training.png"), help="(default: training.png)")
    args = parser.parse_args()
    state = find_state(args.run)
    log = json.loads(state.read_text())["log_history"]
    if not any("ar_loss" in entry for entry in log):
        raise SystemExit(
            f"{state} holds no step that MARS logged. Train for more steps, or set a lower `logging_steps`."
        )

    figure, (losses, depths, speed) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw(losses, log, {"ar_loss": "clean stream (AR)", "mask_loss": "masked stream"})
    losses.set(ylabel="loss per target (nats)", title="Loss")
    names = {name for entry in log for name in entry if name.startswith("mask_accuracy/depth_")}
    by_depth = sorted(names, key=lambda name: int(name.rpartition("_")[2]))
    draw(depths, log, {name: f"[MASK] {name.rpartition('_')[2]}" for name in by_depth})
    depths.set(ylabel="share of targets ranked first", title="Masked stream, by place of the [MASK]")
    draw(speed, log, {"tokens_per_forward@0.95": "threshold 0.95, teacher-forced"}, lowest=1.0)
    speed.set(ylabel="tokens per forward pass", title="What decoding will give")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=100)
    print(f"Saved {args.output}.")


if __name__ == "__main__":
    main()
