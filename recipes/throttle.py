"""A threshold that follows the load: a controller in front of a server lowers it while requests pile up.

Start a server, in vLLM's environment (docs/vllm.md):

    python -m mars_hf.vllm.serve CHECKPOINT --max-num-seqs 16

Then, in the environment of this library:

    python recipes/throttle.py --data gsm8k/test.jsonl --output throttle.png

The load rises and falls in phases, once at a fixed threshold and once with the throttle. The picture shows the latency
of each request, and the threshold it was given.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import matplotlib
from _arguments import above_zero, positive, up_to_one
from _problems import read_problems

matplotlib.use("Agg")
from matplotlib import pyplot

MOST_IN_FLIGHT = 256


class RefusedError(Exception):
    """A server is there, and does not answer a request as it should."""


@dataclass
class Throttle:
    """Lowers the threshold while more requests are in flight than the server should have, and raises it again after.

    Attributes:
        highest, lowest: bounds of the threshold; equal, they turn the throttle off.
        step: how far it goes at a time.
        target: requests in flight that the server should have; between half of it and all of it the threshold stays.
    """

    highest: float
    lowest: float
    step: float
    target: int
    threshold: float = field(init=False)

    def __post_init__(self) -> None:
        self.threshold = self.highest

    def look(self, in_flight: int) -> None:
        """Take one step, or none; asked at regular times."""
        if in_flight > self.target:
            self.threshold = max(self.threshold - self.step, self.lowest)
        elif in_flight < self.target / 2:
            self.threshold = min(self.threshold + self.step, self.highest)


@dataclass
class Answer:
    """One request: when it was sent (seconds from the start), how long it took, and its threshold."""

    sent: float
    latency: float
    threshold: float


@dataclass
class Load:
    """Requests at Poisson times, at rates that change from phase to phase; the same ones for every run with a seed.

    Attributes:
        server: address.
        questions: asked in turn.
        phases: (seconds, requests per second) one after the other.
        new_tokens: of an answer, at most.
        period: seconds from one look of the throttle to the next.
        answers: those of the run so far.
        in_flight: requests that wait for theirs.
        lock: held by whoever changes these two.
        start: when the run began, by `time.perf_counter`.
    """

    server: str
    questions: Sequence[str]
    phases: Sequence[tuple[float, float]]
    new_tokens: int
    period: float
    answers: list[Answer] = field(init=False, default_factory=list)
    in_flight: int = field(init=False, default=0)
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    start: float = field(init=False, default=0.0)

    def run(self, throttle: Throttle, seed: int = 0) -> list[Answer]:
        """Send all requests, and wait for the last answer."""
        self.answers, self.in_flight, self.start = [], 0, time.perf_counter()
        model = self._call("models")["data"][0]["id"]
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(throttle, ended))
        watch.start()
        try:
            with ThreadPoolExecutor(MOST_IN_FLIGHT) as pool:
                sends = []
                for number, sent in enumerate(self._times(seed)):
                    time.sleep(max(0.0, self.start + sent - time.perf_counter()))
                    sends.append(pool.submit(self._ask, model, number, throttle.threshold))
            for send in sends:
                send.result()  # raises what a request raised
        finally:
            ended.set()
            watch.join()
        return self.answers

    def _times(self, seed: int) -> list[float]:
        rng, times, begin = random.Random(seed), [], 0.0
        for seconds, rate in self.phases:
            now = begin + rng.expovariate(rate)
            while now < begin + seconds:
                times.append(now)
                now += rng.expovariate(rate)
            begin += seconds
        return times

    def _watch(self, throttle: Throttle, ended: threading.Event) -> None:
        while not ended.wait(self.period):
            throttle.look(self.in_flight)

    def _ask(self, model: str, number: int, threshold: float) -> None:
        sent = time.perf_counter()
        with self.lock:
            self.in_flight += 1
        body = {
            "model": model,
            "messages": [{"role": "user", "content": self.questions[number % len(self.questions)]}],
            "temperature": 0,
            "max_tokens": self.new_tokens,
            "vllm_xargs": {"mars_threshold": threshold},
        }
        try:
            self._call("chat/completions", body)
            with self.lock:
                self.answers.append(Answer(sent - self.start, time.perf_counter() - sent, threshold))
        finally:
            with self.lock:
                self.in_flight -= 1

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server}/v1/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)
        except HTTPError as error:
            with error:
                reason = error.read().decode(errors="replace")
            raise RefusedError(f"{self.server} answers {error.code} {error.reason}: {reason}") from None


def percentile_95(answers: Sequence[Answer]) -> float:
    latencies = [answer.latency for answer in answers]
    return statistics.quantiles(latencies, n=20)[-1] if len(latencies) > 1 else latencies[0]


def plot(runs: dict[str, list[Answer]], phases: Sequence[tuple[float, float]], output: Path) -> None:
    """Latency above, threshold in the middle, load below."""
    figure, (above, middle, below) = pyplot.subplots(
        3, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2, 1), layout="constrained"
    )
    for (name, answers), colour in zip(runs.items(), ("tab:gray", "tab:blue"), strict=True):
        answers = sorted(answers, key=lambda answer: answer.sent)
        times = [answer.sent for answer in answers]
        label = f"{name}: 95% within {percentile_95(answers):.1f} s"
        above.plot(times, [answer.latency for answer in answers], ".", color=colour, label=label)
        middle.plot(times, [answer.threshold for answer in answers], drawstyle="steps-post", color=colour)
    begin = 0.0
    for seconds, rate in phases:
        below.bar(begin, rate, seconds, align="edge", color="tab:orange")
        begin += seconds
    above.set_ylabel("latency (s)")
    above.legend()
    middle.set_ylabel("threshold")
    below.set_ylabel("requests/s")
    below.set_xlabel("sent at (s)")
    figure.savefig(output, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--data", type=Path, required=True, help='JSON lines with a "question" each')
    parser.add_argument("--output", type=Path, default=Path("throttle.png"))
    parser.add_argument(
        "--rates", type=above_zero, nargs="+", default=[1, 2, 4, 8, 4, 1], help="requests per second, by phase"
    )
    parser.add_argument("--phase_seconds", type=above_zero, default=15)
    parser.add_argument("--new_tokens", type=positive, default=128)
    parser.add_argument(
        "--highest", type=up_to_one, default=1.0, help="threshold of an idle server; 1 is autoregressive"
    )
    parser.add_argument("--lowest", type=up_to_one, default=0.7)
    parser.add_argument("--step", type=above_zero, default=0.1)
    parser.add_argument("--target", type=positive, default=8, help="requests in flight")
    parser.add_argument("--period", type=above_zero, default=0.5, help="seconds from one look at the load to the next")
    args = parser.parse_args()
    if args.lowest > args.highest:
        parser.error(f"--lowest {args.lowest} is above --highest {args.highest}")
    return args


def main() -> None:
    args = parse_args()
    questions = [problem["question"] for problem in read_problems(args.data, 64)]
    phases = [(args.phase_seconds, rate) for rate in args.rates]
    load = Load(args.server, questions, phases, args.new_tokens, args.period)
    runs = {}
    for name, lowest in (("without throttle", args.highest), ("with throttle", args.lowest)):
        throttle = Throttle(args.highest, lowest, args.step, args.target)
        try:
            runs[name] = load.run(throttle)
        except RefusedError as error:
            raise SystemExit(str(error)) from None
        except OSError as error:
            raise SystemExit(f"{args.server} does not answer: {error}. Start the server, or set --server.") from None
        if not runs[name]:
            raise SystemExit("The phases ended before a request was sent. Raise --rates or --phase_seconds.")
        thresholds = statistics.fmean(answer.threshold for answer in runs[name])
        median = statistics.median(answer.latency for answer in runs[name])
        print(
            f"{name}: {len(runs[name])} requests, latency median {median:.2f} s, 95% within "
            f"{percentile_95(runs[name]):.2f} s, mean threshold {thresholds:.2f}"
        )
    plot(runs, phases, args.output)


if __name__ == "__main__":
    main()
