"""Tokens per forward, counted where they are made.

vLLM's own acceptance rate counts the [MASK]s as drafts that were wrong, and so reads far too low.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram

# Requests that have ended and are remembered one by one.
REMEMBERED = 1000
BUCKETS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


class Prometheus(NamedTuple):
    """The counters that `/metrics` shows."""

    tokens: Counter
    forwards: Counter
    per_request: Histogram


@cache
def prometheus() -> Prometheus:
    """The counters of this process, which may have one engine after another but each name once."""
    return Prometheus(
        Counter("mars_generated_tokens", "Tokens that requests were given."),
        Counter("mars_request_forwards", "Steps that gave a request at least one token."),
        Histogram(
            "mars_request_tokens_per_forward", "Tokens per forward of requests that have ended.", buckets=BUCKETS
        ),
    )


class MarsCounters:
    """Counts of one worker, in Prometheus and by request.

    The worker is a process of its own, so vLLM's `/metrics` shows these only if PROMETHEUS_MULTIPROC_DIR names a
    folder from the start, as `mars_hf.vllm.serve` sees to.

    Args:
        publish: whether to count in Prometheus; of the workers of a tensor-parallel group one must.
    """

    def __init__(self, publish: bool = True) -> None:
        self.tokens = self.forwards = 0
        self.finished: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._publish = publish

    def step(self, tokens: int) -> None:
        """Note that a forward gave a request so many tokens."""
        self.tokens, self.forwards = self.tokens + tokens, self.forwards + 1
        if self._publish:
            prometheus().tokens.inc(tokens)
            prometheus().forwards.inc()

    def finish(self, request: str, tokens: int, forwards: int) -> None:
        """Note a request that has ended, with its counts."""
        self.finished[request] = tokens, forwards
        if len(self.finished) > REMEMBERED:
            self.finished.popitem(last=False)
        if self._publish:
            prometheus().per_request.observe(tokens / forwards)

    def snapshot(self) -> dict[str, Any]:
        """`tokens` and `forwards` of all requests, and `finished`: both by request id, of the last 1000 to end."""
        return {"tokens": self.tokens, "forwards": self.forwards, "finished": dict(self.finished)}
