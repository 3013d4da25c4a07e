"""Measure a checkpoint: answers that are right, tokens per forward pass, and speed against stock `generate`."""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import datasets
import evaluate
import torch
from _load import as_batch
from _store import Store
from _turns import by_turns
from rich.progress import track
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from mars_hf.metrics import gsm8k_match


@dataclass
class Run:
    """All that one setting of `generate` did with the prompts, over the rounds.

    Attributes:
        tokens: new tokens of each prompt, up to the end of its answer; the same in every round.
        forwards: forward passes that each prompt took part in.
        seconds: time in `generate`, one sum a round.
    """

    tokens: list[list[int]] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        return sum(map(len, self.tokens)) / sum(self.forwards)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / median(self.seconds)

    def speedup(self, stock: "Run") -> float:
        """Tokens per second over those of `stock`, the median of the rounds."""
        times = median(s / own for s, own in zip(stock.seconds, self.seconds, strict=True))
        return times * sum(map(len, self.tokens)) / sum(map(len, stock.tokens))


# How to call `generate`: stock (None), at a threshold, "lossless", or the name of arguments that are given.
Setting = float | str | None
Arguments = Mapping[str, dict[str, Any]]
Job = TypeVar("Job")

# The measurements of a run that has not ended, in its output folder.
UNFINISHED = "unfinished.jsonl"

# Checkpoints may come with sampling parameters, which greedy decoding would warn about.
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    mars_settings: Sequence[Setting],
    batch_size: int,
    max_new_tokens: int,
    rounds: int = 1,
    arguments: Arguments | None = None,
    store: Store | None = None,
) -> dict[Setting, Run]:
    """Answer the questions, as chats padded on the left, with stock `generate` (key None) and with each setting.

    `arguments` has those of `generate` for settings with a name of their own. What is in `store` is not done again,
    and what is done goes there at once.

    The settings take turns batch by batch, and change places from round to round, so that whatever else the machine
    does meets them all alike. The clock runs in `generate` only.
    """
    settings: list[Setting] = [None, *mars_settings]
    runs = {setting: Run(seconds=[0.0] * rounds) for setting in settings}
    batches = [
        as_batch(tokenizer, questions[i : i + batch_size]).to(model.device)
        for i in range(0, len(questions), batch_size)
    ]
    jobs = [
        (number, batch, setting)
        for number in range(rounds)
        for batch in batches
        for setting in by_turns(settings, number)
    ]
    keys = [""] * len(jobs)
    if store is not None:
        weights = sum(parameter.detach().sum(dtype=torch.float64).item() for parameter in model.parameters())
        common = [weights, str(model.dtype), max_new_tokens]
        keys = [
            _key(*common, number, batch["input_ids"].tolist(), setting, (arguments or {}).get(str(setting)))
            for number, batch, setting in jobs
        ]
    open_settings = {
        setting for key, (*_, setting) in zip(keys, jobs, strict=True) if store is None or key not in store
    }
    for setting in settings:
        if setting in open_settings:  # the first call of each pays for what later ones find ready
            answer(model, batches[0], setting, max_new_tokens, arguments)
    named = list(zip(keys, jobs, strict=True))
    for key, (number, batch, setting) in follow(named, f"{len(questions)} problems, batch size {batch_size}"):
        if store is not None and key in store:
            tokens, forwards, seconds = (store[key][name] for name in ("tokens", "forwards", "seconds"))
        else:
            tokens, forwards, seconds = answer(model, batch, setting, max_new_tokens, arguments)
            if store is not None:
                store.add(key, tokens=tokens, forwards=forwards, seconds=seconds)
        runs[setting].seconds[number] += seconds
        if number == 0:
            runs[setting].tokens += tokens
            runs[setting].forwards += forwards
    return runs


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def follow(jobs: Sequence[Job], description: str) -> Iterator[Job]:
    """Go through the jobs: with a bar on a terminal, with a line for every tenth of them on stderr elsewhere."""
    if sys.stdout.isatty():
        yield from track(jobs, description)
        return
    started = time.perf_counter()
    for done, job in enumerate(jobs, 1):
        yield job
        if done * 10 // len(jobs) > (done - 1) * 10 // len(jobs):
            seconds = time.perf_counter() - started
            print(f"{description}: {done} of {len(jobs)} calls, {seconds:.0f} s", file=sys.stderr, flush=True)


def answer(
    model: PreTrainedModel,
    batch: BatchEncoding,
    setting: Setting,
    max_new_tokens: int,
    arguments: Arguments | None = None,
) -> tuple[list[list[int]], list[int], float]:
    """Generate greedily: new tokens and forward passes of each row, and the seconds it took."""
    mars: dict[str, Any] = {"mars_lossless": True} if setting == "lossless" else {"mars_threshold": setting}
    if isinstance(setting, str) and arguments is not None and setting in arguments:
        mars = arguments[setting]
    calls: list[None] = []
    counter = model.register_forward_hook(lambda *_: calls.append(None))
    started = time.perf_counter()
    output = model.generate(**batch, **mars, **GREEDY, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
    sequences = output.sequences.tolist()  # waits for the accelerator, if there is one
    seconds = time.perf_counter() - started
    counter.remove()
    tokens = [until_stop(row[batch["input_ids"].shape[1] :], stop_ids(model)) for row in sequences]
    if hasattr(output, "accepted_lengths"):
        return tokens, (output.accepted_lengths > 0).sum(-1).tolist(), seconds
    # Stock `generate` has one token a forward; its assisted decoding has more, and one row.
    return tokens, [len(calls)] if len(tokens) == 1 else [len(row) for row in tokens], seconds


def stop_ids(model: PreTrainedModel) -> set[int]:
    """The tokens that end a reply."""
    stops = model.generation_config.eos_token_id
    return set(stops if isinstance(stops, list) else [stops])


def until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """The tokens up to the first stop token, which is kept: what follows is padding."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


class FinalAnswer(evaluate.Metric):
    """Share of replies whose number after `####` is that of the reference, with a 95% Wilson interval.

    A reference without such a number raises a `ValueError`.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        right = sum(gsm8k_match(*pair)[0] for pair in zip(predictions, references, strict=True))
        low, high = wilson_interval(right, len(references))
        return {"accuracy": right / len(references), "low": low, "high": high}


def has_final_answer(problem: Mapping[str, Any]) -> bool:
    """Whether a problem's `answer` has a number after `####`, so that replies can be counted."""
    try:
        gsm8k_match("", str(problem.get("answer", "")))
    except ValueError:
        return False
    return True


def refuse_open_problems(problems: Sequence[Mapping[str, Any]], source: object) -> None:
    """End with a line about the first problem without a final answer."""
    for number, problem in enumerate(problems, 1):
        if not has_final_answer(problem):
            raise SystemExit(f"The answer of problem {number} of {source} has no `#### number` to compare with.")


def wilson_interval(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share; unlike the textbook one it is of use near 0 and 1."""
    share = right / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
