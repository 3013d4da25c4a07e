"""The memory that this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

try:
    import psutil
except ImportError:
    # The copy of this file that a checkpoint carries runs where there may be nothing but torch and transformers.
    psutil = None

# The control groups that bound a container or a job: which this process is in, and where they are mounted.
OWN_GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# By version of control groups: the files of a group's limit and use, and the entry of its statistics that holds what
# of the use would be given up for others, such as files that were read.
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_memory() -> int | None:
    """Bytes that the machine and the control groups of this process leave it; None if that is not known."""
    if psutil is None:
        return None
    return min([psutil.virtual_memory().available, *_room_in_groups()])


def _room_in_groups() -> Iterator[int]:
    """Bytes that each group with a limit leaves, from the innermost."""
    try:
        groups = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers == "":
            version, mount = 2, MOUNT
        elif "memory" in controllers.split(","):
            version, mount = 1, MOUNT / "memory"
        else:
            continue
        # A group is bound by those around it. In a container the path may be that of the host, and of all these
        # folders only the mount is there.
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(mount) and (room := _room(group, *FILES[version])) is not None:
                yield room


def _room(group: Path, limit: str, used: str, idle: str) -> int | None:
    try:
        bound, taken = int((group / limit).read_text()), int((group / used).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No such group, or one whose limit is "max".
        return None
    return max(0, bound - taken + int(statistics.get(idle, 0)))
