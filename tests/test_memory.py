"""The memory that a process may take is what the machine and the groups around it leave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mars_hf import memory
from mars_hf.memory import available_memory

GB = 2**30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 8 GB to give, and a function that writes the files of a group."""
    monkeypatch.setattr(memory, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=8 * GB)))
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "MOUNT", tmp_path / "mount")

    def write(own: str, group: str, version: int, limit: object, used: int, idle: int = 0) -> None:
        (tmp_path / "own").write_text(own)
        folder = tmp_path / "mount" / group
        folder.mkdir(parents=True, exist_ok=True)
        names = memory.FILES[version]
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {idle}\n")

    return write


def test_without_groups_it_is_the_machines(machine):
    assert available_memory() == 8 * GB


@pytest.mark.parametrize(
    ("limit", "used", "idle", "room"),
    [("max", GB, 0, 8), (64 * GB, GB, 0, 8), (4 * GB, GB, 0, 3), (4 * GB, 3 * GB, 2 * GB, 3), (GB, 2 * GB, 0, 0)],
)
@pytest.mark.parametrize(
    ("own", "group", "version"),
    [
        ("0::/\n", ".", 2),
        ("0::/jobs/7\n", "jobs/7", 2),
        # Bound by the group around it, and a path that is the host's.
        ("0::/jobs/7\n", "jobs", 2),
        ("0::/docker/abc\n", ".", 2),
        ("7:cpu,cpuacct:/\n4:memory:/jobs/7\n0::/\n", "memory/jobs/7", 1),
        ("4:hugetlb,memory:/docker/abc\n", "memory", 1),
    ],
)
def test_a_group_bounds_it(machine, own, group, version, limit, used, idle, room):
    machine(own, group, version, limit, used, idle)
    assert available_memory() == room * GB


def test_the_narrowest_of_several_groups_counts(machine):
    machine("0::/jobs/7\n", "jobs/7", 2, 6 * GB, 0)
    machine("0::/jobs/7\n", "jobs", 2, 4 * GB, 2 * GB)
    assert available_memory() == 2 * GB


def test_groups_of_others_do_not_count(machine):
    machine("0::/jobs/7\n", "jobs/8", 2, GB, 0)
    assert available_memory() == 8 * GB


def test_unknown_without_psutil(monkeypatch):
    monkeypatch.setattr(memory, "psutil", None)
    assert available_memory() is None
