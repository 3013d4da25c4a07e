"""The model card of a MARS checkpoint: metadata that the Hub accepts, how to generate, and what was measured."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

PAPER = "[MARS](https://huggingface.co/papers/2604.07023)"
TAGS = ("mars", "text-generation")
HEADING = "## Several tokens per forward pass"
MEASURED = "## Measured"
# Where the table of one split of a dataset begins.
TABLE = re.compile(r"^(?=On .+\.$)", re.MULTILINE)
# How the metadata name the settings that are no threshold.
NAMES = {"none": "without MARS", "lossless": "with mars_lossless"}

TEMPLATE = """\
# {name}

{origin}

{heading}

It was trained with {paper}: besides the next token it predicts the tokens after it, up to {block_size} in one forward
pass. `mars_threshold` says how sure it must be of a token to take it without another pass; lower is faster, and 1.0
is ordinary decoding, one token at a time.

```python
from mars_hf import AutoMarsModelForCausalLM
from transformers import pipeline
generator = pipeline("text-generation", model=AutoMarsModelForCausalLM.from_pretrained("{repo}"), tokenizer="{repo}")
generator([{{"role": "user", "content": "What is 12 * 12?"}}], do_sample=False, mars_threshold=0.9, max_new_tokens=128)
```

{without_library}
"""
WITHOUT_LIBRARY = """\
Without `mars_hf`, from the code in this repository's `custom_generate` folder, the same tokens come from
`AutoModelForCausalLM.from_pretrained("{repo}", trust_remote_code=True).generate(**inputs, mars_threshold=0.9)`.

It is an ordinary checkpoint too: whatever loads its architecture, transformers without the above or a server that
knows nothing of MARS, generates one token at a time with it."""
ADAPTER_WITHOUT_LIBRARY = """\
It is an ordinary adapter too: PEFT loads it on its base model, and generates one token at a time with it."""


@dataclass
class CardFacts:
    """What is known of a checkpoint.

    Attributes:
        name: what the card calls it.
        repo: what `from_pretrained` is given in the example.
        block_size: tokens of a block in training.
        base_model: repository of the model it was fine-tuned from.
        datasets: repositories of the data.
        tags: besides those of every MARS checkpoint.
        is_adapter: it holds a PEFT adapter only.
        training: figures logged in training, name to value.
        tail: more of the card's text, kept as it is.
    """

    name: str
    repo: str
    block_size: int
    base_model: str | None = None
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    is_adapter: bool = False
    training: dict[str, float] = field(default_factory=dict)
    tail: str = ""


def make_card(facts: CardFacts) -> ModelCard:
    """The card of a checkpoint whose speed and accuracy are not measured yet; `record_results` adds them."""
    origin = "A causal language model"
    if facts.base_model:
        origin = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    origin += ", an adapter for it" if facts.is_adapter and facts.base_model else ""
    if facts.datasets:
        links = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in facts.datasets)
        origin += f", fine-tuned on {links}"
    else:
        origin += ", fine-tuned"
    without = ADAPTER_WITHOUT_LIBRARY if facts.is_adapter else WITHOUT_LIBRARY.format(repo=facts.repo)
    text = TEMPLATE.format(
        name=facts.name,
        origin=f"{origin}.",
        heading=HEADING,
        paper=PAPER,
        block_size=facts.block_size,
        repo=facts.repo,
        without_library=without,
    )
    data = ModelCardData(
        base_model=facts.base_model,
        datasets=facts.datasets or None,
        library_name="peft" if facts.is_adapter else "transformers",
        model_name=facts.name,
        pipeline_tag="text-generation",
        tags=sorted({*TAGS, *facts.tags}),
    )
    parts = [text, _training_table(facts.training), facts.tail]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(part for part in parts if part))


def _training_table(training: Mapping[str, float]) -> str:
    if not training:
        return ""
    rows = "".join(f"| {name} | {value:.3g} |\n" for name, value in training.items())
    return (
        f"## Logged in training\n\nWith the true text before each block, not its own.\n\n| | |\n| --- | --- |\n{rows}"
    )


def is_mars_card(card: ModelCard) -> bool:
    """Whether the text of a card is one that `make_card` made."""
    return HEADING in card.text


def add_tags(card: ModelCard, tags: Iterable[str]) -> None:
    """Add tags to a card, behind those it has."""
    known = list(card.data.get("tags") or [])
    card.data["tags"] = known + [tag for tag in tags if tag not in known]


def record_results(
    folder: str | os.PathLike[str], dataset: str, results: Iterable[Mapping[str, Any]], split: str = "test"
) -> None:
    """Write measured figures into the model card of a saved checkpoint: a table, and metadata that the Hub shows.

    They take the place of earlier ones of the same split of the same data; all others stay.

    Args:
        folder: a saved checkpoint with its `README.md`.
        dataset: name or repository of the data that was measured on.
        results: one mapping per threshold with `setting` (a threshold, or "lossless"; None for decoding without MARS),
            `tokens_per_forward`, and `accuracy` in 0..1 where it is known. Other entries are not read, so that the
            rows of `recipes/evaluate_gsm8k.py` can be passed as they are.
        split: the split of the data.

    Raises:
        ValueError: if there is no card, or a row lacks its figures.
    """
    path = Path(folder, "README.md")
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. Write it with `trainer.create_model_card()`, or write a card by hand first."
        )
    card = ModelCard.load(path)
    rows = [_read_row(row) for row in results]
    lines = [
        f"On {dataset}, {split}.\n",
        "| `mars_threshold` | tokens per forward | accuracy |",
        "| --- | ---: | ---: |",
        *(
            f"| {setting} | {speed:.2f} | {'' if accuracy is None else f'{accuracy:.1%}'} |"
            for setting, speed, accuracy in rows
        ),
    ]
    before, tables, rest = _around_tables(card.text)
    parts = [part.strip() for part in re.split(TABLE, tables) if part.strip()]
    kept = [f"{part}\n" for part in parts if part.splitlines()[0] != lines[0].strip()]
    card.text = "\n".join([before.rstrip() + "\n", f"{MEASURED}\n", *kept, *lines, rest])
    card.data.model_name = card.data.model_name or Path(folder).name
    others = [r for r in card.data.eval_results or [] if (r.dataset_type, r.dataset_split) != (dataset, split)]
    card.data.eval_results = others + [result for row in rows for result in _metadata(row, dataset, split)]
    card.save(path)


def keep_results(card: ModelCard, earlier: ModelCard) -> None:
    """Put what `record_results` wrote into an earlier card into a new one, which takes its place."""
    _, tables, _ = _around_tables(earlier.text)
    if not tables:
        return
    card.text = f"{card.text.rstrip()}\n\n{MEASURED}\n{tables.rstrip()}\n"
    data: Any = card.data
    data.model_name = data.model_name or earlier.data.get("model_name")
    data.eval_results = earlier.data.get("eval_results")


def _around_tables(text: str) -> tuple[str, str, str]:
    """The text of a card before its measured part, that part, and what stands behind it."""
    before, _, after = text.partition(f"{MEASURED}\n")
    tables, heading, rest = after.partition("\n## ")
    return before, tables, heading + rest


def _read_row(row: Mapping[str, Any]) -> tuple[str, float, float | None]:
    if "setting" not in row or "tokens_per_forward" not in row:
        raise ValueError(f"A result needs `setting` and `tokens_per_forward`, got {sorted(row)}.")
    setting = "none" if row["setting"] is None else str(row["setting"])
    accuracy = row.get("accuracy")
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise ValueError(f"`accuracy` must be in 0..1, got {accuracy!r}.")
    return setting, float(row["tokens_per_forward"]), None if accuracy is None else float(accuracy)


def _metadata(row: tuple[str, float, float | None], dataset: str, split: str) -> list[EvalResult]:
    setting, speed, accuracy = row
    figures = [("tokens_per_forward", speed), ("accuracy", accuracy)]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split=split,
            metric_type=metric,
            metric_name=f"{metric} {NAMES.get(setting, f'at mars_threshold={setting}')}",
            metric_value=round(value, 4),
        )
        for metric, value in figures
        if value is not None
    ]
