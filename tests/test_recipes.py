"""The recipes, run as a person runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

RECIPES = Path(__file__).parents[1] / "recipes"
QUESTION = "Tom has 37 apples. Tom buys 25 more. How many apples does Tom have now?"


def run(recipe: str, *args: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RECIPES / recipe, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the quickstart writes, and what it prints."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, run("quickstart.py", "--fast", "--output_dir", folder).stdout


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"question": QUESTION, "answer": "37 + 25 = 62\n#### 62"}] * 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_quickstart(quickstart: tuple[Path, str]):
    folder, output = quickstart
    assert "gave the tokens of stock generate" in output
    assert all(f"MARS, {threshold}" in output for threshold in ("stock", 1.0, 0.95, 0.9, 0.8, 0.7))
    assert (folder / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert GenerationConfig.from_pretrained(folder).mars_block_size == 4


def test_generate_streams_one_prompt(quickstart: tuple[Path, str]):
    result = run("generate.py", quickstart[0], QUESTION, "--max_new_tokens", "8")
    assert "tokens per forward" in result.stderr
    assert QUESTION not in result.stdout


def test_generate_answers_several_prompts(quickstart: tuple[Path, str]):
    result = run("generate.py", quickstart[0], "--max_new_tokens", "4", stdin=f"{QUESTION}\n\nHi.\n")
    assert f"> {QUESTION}" in result.stdout
    assert "> Hi." in result.stdout


def test_evaluate_gsm8k(quickstart: tuple[Path, str], problems: Path, tmp_path: Path):
    folder, _ = quickstart
    args = ("--limit", "2", "--batch_size", "1", "2", "--mars_threshold", "1.0", "0.9", "--max_new_tokens", "4")
    result = run("evaluate_gsm8k.py", folder, "--data", problems, *args, "--output_dir", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["batch_size"], row["setting"]) for row in rows] == [
        (size, setting) for size in (1, 2) for setting in (None, 1.0, 0.9, "lossless")
    ]
    assert rows[1]["same_as_stock"] == 1.0
    assert "| 2 | 0.9 |" in result.stdout


def test_lossless(quickstart: tuple[Path, str], problems: Path, tmp_path: Path):
    folder, _ = quickstart
    args = ("--limit", "2", "--batch_size", "1", "2", "--mars_threshold", "0.9", "--max_new_tokens", "12")
    sources = ("--mars_draft_length", "3", "--mars_tree_budget", "8", "auto", "--mars_draft_choices", "1", "2")
    result = run(
        "lossless.py", folder, "--data", problems, *args, *sources, "--dtype", "float32", "--output_dir", tmp_path
    )
    rows = json.loads((tmp_path / "results.json").read_text())
    by_setting = {(row["batch_size"], row["setting"]): row for row in rows}
    assert (1, "prompt lookup") in by_setting
    assert (2, "prompt lookup") not in by_setting
    for size in (1, 2):
        for setting in ("lossless, 3 drafts", "lossless, 3 drafts and lookup, budget 8, 2 choices"):
            assert by_setting[size, setting]["same_text"] == 1.0
            assert by_setting[size, setting]["differences"] == []
            # The quick checkpoint has learned too little for more than a run of the recipe.
            assert by_setting[size, setting]["tokens_per_forward"] >= 1.0
    assert by_setting[1, "lossless, 3 drafts"]["against_prompt_lookup"] > 0
    assert re.search(r"2 problems, batch size 2: (\d+) of \1 calls", result.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lossless.png", "results.json", "results.md"]
    assert "| 2 | 0.9 |" in result.stdout
    assert (tmp_path / "lossless.png").read_bytes().startswith(b"\x89PNG")


def test_benchmark_decoding(quickstart: tuple[Path, str], problems: Path, tmp_path: Path):
    args = ("--data", problems, "--limit", "2", "--batch_sizes", "1", "2", "--max_new_tokens", "12", "--rounds", "1")
    args = (*args, "--dtype", "float32", "--threshold", "0.01")
    result = run("benchmark_decoding.py", quickstart[0], *args, "--output_dir", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "decoding.jsonl").read_text().splitlines()]
    settings = ["none, 0.01", "block 16, 0.01", "block 32, 0.01", "cursor, 0.01", "adaptive, 0.01"]
    assert [row["setting"] for row in rows] == ["stock", "prompt lookup", *settings, "stock", *settings]
    assert rows[0]["speedup"] == rows[0]["tokens_per_forward"] == 1.0
    assert rows[5]["tokens_per_forward"] > 1.2
    assert (tmp_path / "decoding.png").read_bytes().startswith(b"\x89PNG")
    table = [line for line in result.stdout.splitlines() if any(f"| {row['setting']} |" in line for row in rows)]
    assert [" slower |" in line for line in table] == [row["speedup"] < 1 for row in rows]


def test_plot_training(quickstart: tuple[Path, str], tmp_path: Path):
    picture = tmp_path / "training.png"
    run("plot_training.py", quickstart[0], "--output", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_teaching_study(tmp_path: Path):
    args = ("--fast", "--ways", "fixed", "random, growing", "--output_dir", tmp_path)
    assert "tokens per forward at" in run("teaching_study.py", *args).stdout
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["way"] for row in rows] == ["fixed", "random, growing"]
    assert run("teaching_study.py", *args).stderr == ""  # nothing is trained twice


def test_benchmark_training(quickstart: tuple[Path, str], problems: Path):
    problems.write_text(problems.read_text() * 9)
    output = run("benchmark_training.py", "--model", quickstart[0], "--gsm8k", problems, "--fast").stdout
    for kind in ("prompt-heavy", "chat", "all tokens"):
        assert sum(line.startswith(f"| {kind} ") for line in output.splitlines()) == 3


def test_sft_help():
    output = run("sft.py", "--help").stdout
    for flag in ("--model_name_or_path", "--dataset_name", "--use_peft", "--mars_block_size", "--prompt_column"):
        assert flag in output


@pytest.mark.parametrize(
    "lora", [(), ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")], ids=["full", "lora"]
)
def test_sft_takes_two_steps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Path,
    tmp_path: Path,
    lora: tuple[str, ...],
):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run(
        "sft.py",
        *("--model_name_or_path", tmp_path / "model", "--dataset_name", problems),
        *("--prompt_column", "question", "--completion_column", "answer", "--max_steps", "2"),
        *(
            "--per_device_train_batch_size",
            "2",
            "--bf16",
            "False",
            "--report_to",
            "none",
            "--output_dir",
            tmp_path / "out",
        ),
        *lora,
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").mask_token == "<|mask|>"
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert log[-1]["step"] == 2
    result = run("generate.py", tmp_path / "out", QUESTION, "--max_new_tokens", "4")
    assert "tokens per forward" in result.stderr
    if lora:
        merged = run("merge_adapter.py", tmp_path / "out", "--output_dir", tmp_path / "merged").stdout
        assert float(re.search(r"at most (\S+) of the largest", merged)[1]) < 1e-5
        assert float(re.search(r"moved by (\S+) of its norm", merged)[1]) < 0.5
        assert GenerationConfig.from_pretrained(tmp_path / "merged").mars_block_size == 4
        # Readers without the library, and other engines, find what the trainer's own folder has.
        assert (tmp_path / "merged" / "custom_generate" / "generate.py").is_file()
        config = json.loads((tmp_path / "merged" / "config.json").read_text())
        assert config["mask_token_id"] == AutoTokenizer.from_pretrained(tmp_path / "merged").mask_token_id


def test_plot_training_finds_the_last_checkpoint(tmp_path: Path):
    for step in (9, 10):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        log = [{"step": step, "ar_loss": 1.0, "mask_loss": 2.0}]
        # Of the two only the last can be read.
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}) if step == 10 else "")
    run("plot_training.py", tmp_path / "out", "--output", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    command = [sys.executable, RECIPES / "plot_training.py", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert "trainer.save_state()" in result.stderr
