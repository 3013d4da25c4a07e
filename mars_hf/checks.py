"""Checks that several kinds of arguments share."""

from __future__ import annotations

from typing import Any


def check_count(name: str, value: Any, least: int, otherwise: str = "") -> None:
    """Check an argument that counts something; `otherwise` says what else it may be.

    Raises:
        ValueError: unless the value is an integer of at least `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}{otherwise}, got {value!r}.")
