"""Where the metric modules of this package are, for `evaluate.load`."""

from pathlib import Path

FOLDER = Path(__file__).parent


def metric_path(name: str) -> str:
    """The path of a metric module: `evaluate.load(metric_path("gsm8k_exact_match"))`, which needs no network.

    Raises:
        ValueError: for a name that there is no metric of.
    """
    path = FOLDER / name / f"{name}.py"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*/*.py") if file.stem == file.parent.name)
        raise ValueError(f"There is no metric {name!r}. Take one of {', '.join(known)}.")
    return str(path)
