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


def draw(axes: Axes, log: list[dict], curves: dict[str, str]) -> None:
    """Draw each curve of `curves` (name in the log, label) that the log holds."""
    for name, label in curves.items():
        points = [(entry["step"], float(entry[name])) for entry in log if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
    if axes.lines:
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
    log = json.loads(find_state(args.run).read_text())["log_history"]

    figure, (losses, depths, speed) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw(losses, log, {"ar_loss": "clean stream (AR)", "mask_loss": "masked stream"})
    losses.set(ylabel="loss per target (nats)", ylim=(0, None), title="Loss")
    names = {name for entry in log for name in entry if name.startswith("mask_accuracy/depth_")}
    by_depth = sorted(names, key=lambda name: int(name.rpartition("_")[2]))
    draw(depths, log, {name: f"[MASK] {name.rpartition('_')[2]}" for name in by_depth})
    depths.set(ylabel="share of targets ranked first", ylim=(0, None), title="Masked stream, by place of the [MASK]")
    draw(speed, log, {"tokens_per_forward@0.95": "threshold 0.95, teacher-forced"})
    speed.set(ylabel="tokens per forward pass", ylim=(1, None), title="What decoding will give")
    figure.savefig(args.output, dpi=100)
    print(f"Saved {args.output}.")


if __name__ == "__main__":
    main()
