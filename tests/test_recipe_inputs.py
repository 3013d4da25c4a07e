"""What recipes say of wrong input, and how a measurement goes on that was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import _measure
import plot_training
import pytest
import sft
from _measure import Run, measure
from _problems import read_problems
from conftest import make_model, make_tokenizer
from datasets import Dataset, DatasetDict
from paper_store import Store
from trl import DatasetMixtureConfig, ScriptArguments

RECIPES = Path(__file__).parents[1] / "recipes"
ROW = {"question": "a\u2028b\u0085c?", "answer": "#### 1"}


def test_problems_may_hold_any_sign_and_blank_lines(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(ROW, ensure_ascii=False)}\n\n" * 3, encoding="utf-8")
    assert read_problems(path, 2) == [ROW] * 2
    assert read_problems(path) == [ROW] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "No problem is left"),
        ("\n\n", "No problem is left"),
        ("hello\n", "Row 1 of .* is not JSON"),
        ('{"question": "a", "answer": "b"}\n{"q": "a"}\n', "Row 2 of .* has no question and no answer"),
        ('[{"question": "a"}]', "Row 1 of .* is not an object"),
        (None, "is not a file"),
    ],
)
def test_wrong_problems_are_named(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "data.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        read_problems(path, 5, ("question", "answer"))


def test_generate_takes_one_mode():
    command = [sys.executable, RECIPES / "generate.py", "model", "hi", "--mars_threshold", "0.9", "--mars_lossless"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "not allowed with argument" in result.stderr


@pytest.mark.parametrize("streaming", [False, True])
def test_sft_names_the_flags_that_are_missing(streaming: bool):
    rows = Dataset.from_list([ROW])
    split = rows.to_iterable_dataset() if streaming else rows
    flags = "--prompt_column question --completion_column answer"
    with pytest.raises(SystemExit, match=f"columns question, answer.*{flags}"):
        sft.check_columns(split, sft.ColumnArguments(), "text")
    with pytest.raises(SystemExit, match=flags):
        sft.check_columns(split, sft.ColumnArguments("question", "reply"), "text")
    sft.check_columns(split, sft.ColumnArguments("question", "answer"), "text")
    sft.check_columns(split, sft.ColumnArguments(), "question")
    for names in (["prompt", "completion"], ["messages", "source"], ["input_ids"], ["conversations"]):
        sft.check_columns(Dataset.from_dict({name: ["x"] for name in names}), sft.ColumnArguments(), "text")
    with pytest.raises(SystemExit, match=r"no split 'test' but train\. Set --dataset_test_split"):
        sft.get_split(DatasetDict(train=rows), "test", "dataset_test_split")


@pytest.mark.parametrize("exists", [False, True])
def test_sft_names_a_file_that_holds_nothing(tmp_path: Path, exists: bool):
    path = tmp_path / "data.jsonl"
    if exists:
        path.touch()
    with pytest.raises(SystemExit, match=r"is not a file, or an empty one\. Set --dataset_name"):
        sft.load_splits(ScriptArguments(dataset_name=str(path)), DatasetMixtureConfig())


def test_sft_leaves_only_prompt_and_completion():
    rows = Dataset.from_list([{**ROW, "text": "elsewhere"}])
    (row,) = sft.to_prompt_completion(rows, "question", "answer", chat=False)
    assert row == {"prompt": ROW["question"], "completion": ROW["answer"]}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_logged_steps_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int):
    log = [{"step": step, "ar_loss": 1.0, "mask_loss": 2.0, "mask_accuracy/depth_1": 0.0} for step in range(steps)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    monkeypatch.setattr(sys, "argv", ["plot_training.py", str(tmp_path), "--output", str(tmp_path / "new" / "a.png")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if steps == 0:
            with pytest.raises(SystemExit, match="holds no step"):
                plot_training.main()
        else:
            plot_training.main()
            assert (tmp_path / "new" / "a.png").stat().st_size > 1000


def test_a_measurement_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    calls: list[tuple[int, object]] = []
    most = 9

    def answer(model, batch, setting, max_new_tokens, arguments):
        if len(calls) == most:
            raise KeyboardInterrupt
        calls.append((int(batch["input_ids"].sum()), setting))
        rows = len(batch["input_ids"])
        return [[len(calls)]] * rows, [1] * rows, float(len(calls))

    monkeypatch.setattr(_measure, "answer", answer)
    model, tokenizer = make_model(), make_tokenizer()
    tokenizer.padding_side = "left"
    path = tmp_path / "unfinished.jsonl"

    def start(*settings: float, **options) -> dict[object, Run]:
        calls.clear()
        store = Store(path)
        return measure(model, tokenizer, ["a", "b", "c"], settings, 2, 5, rounds=2, store=store, **options)

    with pytest.raises(KeyboardInterrupt):
        start(0.9)  # two calls to get ready, then seven of eight
    most = 99
    runs = start(0.9)
    assert len(calls) == 1 + 1  # to get ready, and the one that is left
    # What was measured first counts: calls 3 to 9, and now 2.
    assert sum(sum(run.seconds) for run in runs.values()) == sum(range(3, 10)) + 2
    assert [len(run.tokens) for run in runs.values()] == [3, 3]
    capsys.readouterr()
    start(0.9)
    assert calls == []
    assert "3 problems, batch size 2: 8 of 8 calls" in capsys.readouterr().err
    start(0.9, 0.8)
    assert {setting for _, setting in calls} == {0.8}
    model.lm_head.weight.data[0] += 1
    start(0.9)
    assert len(calls) == 2 + 8
