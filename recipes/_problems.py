"""Read problems from a file of JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_problems(
    path: Path, limit: int | None = None, columns: Sequence[str] = ("question",)
) -> list[dict[str, Any]]:
    """The first so many rows of a JSON lines file, each with these columns at least; all of them without a limit."""
    if not path.is_file():
        raise SystemExit(f"{path} is not a file. Name a file of JSON lines with {' and '.join(columns)} in each.")
    # Not `splitlines`: it also splits at signs that JSON allows inside a text.
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()][:limit]
    if not lines:
        raise SystemExit(f"No problem is left of {path} with a limit of {limit}.")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SystemExit(f"Row {number} of {path} is not JSON: {error}") from None
        if not isinstance(row, dict) or (missing := [column for column in columns if column not in row]):
            lacks = "is not an object" if not isinstance(row, dict) else f"has no {' and no '.join(missing)}"
            raise SystemExit(f"Row {number} of {path} {lacks}. Each line must be an object with {', '.join(columns)}.")
        rows.append(row)
    return rows
