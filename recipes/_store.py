"""Results as JSON lines: one record per key, on disk as soon as it is measured, so that a run can go on later."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Store:
    """A file of records; it is always whole, since each change replaces it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: dict[str, Record] = {record["key"]: record for record in map(json.loads, lines)}

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def __getitem__(self, key: str) -> Record:
        return self.records[key]

    def add(self, key: str, **values: Any) -> Record:
        self.records[key] = {"key": key, **values}
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in self.records.values()))
        return self.records[key]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a run that was killed, finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
