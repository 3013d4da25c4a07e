"""The model `mars` of lm-eval: the same scores at any batch size, those of its own `hf` where MARS is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer
from decoding_models import brute_force, save_checkpoint

pytest.importorskip("lm_eval")
# It and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")

MASK = 261
QUESTIONS = ["one and one", "hi", "a much longer question than the others", "two", "and three more"]
THRESHOLD = 0.1

GENERATE = """\
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no", "it depends"]
doc_to_target: 1
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("lm_eval") / "model")


@pytest.fixture(scope="module")
def tasks(checkpoint: Path) -> Path:
    """The tasks; the right answer of every other question is what MARS decoding by its definition gives."""
    from mars_hf import AutoMarsModelForCausalLM

    tokenizer, model = make_tokenizer(), AutoMarsModelForCausalLM.from_pretrained(checkpoint)
    rows = []
    for index, question in enumerate(QUESTIONS):
        prompt = torch.tensor(tokenizer(question).input_ids)
        eos = (tokenizer.eos_token_id,)
        ids, _ = brute_force(model, prompt, THRESHOLD, max_new=16, eos=eos, mask=MASK)
        answer = tokenizer.decode(ids, skip_special_tokens=True).split("\n\n")[0]
        rows.append({"question": question, "answer": answer if index % 2 == 0 else "no"})
    folder = checkpoint.parent / "tasks"
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "generate.yaml").write_text(GENERATE.format(data=folder / "data.jsonl"))
    (folder / "choice.yaml").write_text(CHOICE.format(data=folder / "data.jsonl"))
    return folder


def evaluate(checkpoint: Path, tasks: Path, model: str = "mars", batch_size: int = 1, **options: object) -> dict:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import mars_hf.lm_eval  # noqa: F401  registers the model

    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(checkpoint), "dtype": "float32"},
        tasks=["tiny_generate", "tiny_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )


def replies(results: dict) -> list:
    """What the model said to each question."""
    return [sample["resps"] for sample in results["samples"]["tiny_generate"]]


def weights(results: dict) -> torch.Tensor:
    """The log-likelihoods that it gave the choices, (questions * choices,)."""
    choices = [choice[0] for sample in results["samples"]["tiny_choice"] for choice in sample["resps"]]
    return torch.tensor([float(choice[0]) for choice in choices])


def test_batch_sizes_score_alike_and_as_defined(checkpoint: Path, tasks: Path):
    one, four = (
        evaluate(checkpoint, tasks, batch_size=size, gen_kwargs=f"mars_threshold={THRESHOLD}") for size in (1, 4)
    )
    assert replies(one) == replies(four)
    torch.testing.assert_close(weights(one), weights(four), atol=1e-4, rtol=0)
    assert one["results"]["tiny_choice"]["acc,none"] == four["results"]["tiny_choice"]["acc,none"]
    assert one["results"]["tiny_generate"]["exact_match,none"] == 3 / 5
    assert four["results"]["tiny_generate"]["exact_match,none"] == 3 / 5
    assert one["config"]["tokens_per_forward"] > 1.2
    assert four["config"]["tokens_per_forward"] > 1.2


def test_without_a_threshold_it_is_lm_evals_own_model(checkpoint: Path, tasks: Path):
    own, off = (evaluate(checkpoint, tasks, model=name, batch_size=4) for name in ("hf", "mars"))
    lossless = evaluate(checkpoint, tasks, batch_size=4, gen_kwargs="mars_lossless=True")
    assert replies(own) == replies(off) == replies(lossless)
    assert torch.equal(weights(own), weights(off))
    assert "tokens_per_forward" not in off["config"]
    assert lossless["config"]["tokens_per_forward"] >= 1


def test_command_line(checkpoint: Path, tasks: Path, tmp_path: Path):
    command = [
        *(sys.executable, "-m", "mars_hf.lm_eval", "run", "--model", "mars", "--device", "cpu", "--batch_size", "2"),
        *("--model_args", f"pretrained={checkpoint},dtype=float32", "--tasks", "tiny_generate"),
        *("--include_path", tasks, "--gen_kwargs", f"mars_threshold={THRESHOLD}", "--output_path", tmp_path),
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HOME": str(tmp_path / "home")}
    )
    assert ran.returncode == 0, ran.stderr
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert results["results"]["tiny_generate"]["exact_match,none"] == 3 / 5
    assert results["config"]["tokens_per_forward"] > 1.2
    assert "tokens per forward" in ran.stderr + ran.stdout
