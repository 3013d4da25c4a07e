"""The numbers that GSM8K replies and references end in."""

from __future__ import annotations

import re
from decimal import Decimal

NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"####\s*({NUMBER})")
ANY = re.compile(NUMBER)


def gsm8k_match(reply: str, reference: str) -> tuple[bool, bool]:
    """Whether a reply's number is that of the reference, which ends in `#### number`.

    Returns:
        Strict: by the number behind the reply's first `####`, wrong without one. Flexible: by the reply's last number.

    Raises:
        ValueError: for a reference without a marked number.
    """
    wanted = marked_number(reference)
    if wanted is None:
        raise ValueError(f"The reference has no `#### number`: {reference!r}.")
    return marked_number(reply) == wanted, last_number(reply) == wanted


def marked_number(text: str) -> Decimal | None:
    """The number behind the first `####`."""
    match = MARKED.search(text)
    return as_number(match[1]) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number of a text."""
    found = ANY.findall(text)
    return as_number(found[-1]) if found else None


def as_number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
