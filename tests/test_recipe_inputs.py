"""What recipes say of wrong input, and how a measurement goes on that was stopped."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import _measure
import benchmark_decoding
import benchmark_vllm
import evaluate_gsm8k
import lossless
import merge_adapter
import plot_training
import pytest
import quickstart
import sft
import teaching_study
import throttle
import torch
from _load import as_batch
from _measure import Run, measure
from _problems import read_problems
from _store import Store
from conftest import SMALL, make_model, make_tokenizer
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from mars_hf import MarsSFTConfig, MarsSFTTrainer, add_mask_token

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


def test_sft_takes_the_tokenizer_of_the_models_revision(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(sft.AutoTokenizer, "from_pretrained", lambda name, **kwargs: asked.append((name, kwargs)))
    for given, kwargs in ((None, {}), ({"revision": "X"}, {}), ({"trust_remote_code": True}, {"dtype": "float16"})):
        args = SimpleNamespace(model_init_kwargs=given, trust_remote_code=False)
        sft.load_tokenizer(ModelConfig(model_name_or_path="a/b", model_revision="Y", **kwargs), args)
        name, options = asked[-1]
        assert (name, options["revision"]) == ("a/b", args.model_init_kwargs["revision"])
        assert options["revision"] == ("X" if given and "revision" in given else "Y")
        assert options["trust_remote_code"] == bool(given and "trust_remote_code" in given)
    assert args.model_init_kwargs["dtype"] == "float16"
    with pytest.raises(SystemExit, match="Set --model_name_or_path"):
        sft.load_tokenizer(ModelConfig(), args)


def test_sft_leaves_only_prompt_and_completion():
    rows = Dataset.from_list([{**ROW, "text": "elsewhere"}])
    (row,) = sft.to_prompt_completion(rows, "question", "answer", chat=False)
    assert row == {"prompt": ROW["question"], "completion": ROW["answer"]}


def test_sft_resumes_from_the_last_checkpoint_or_from_a_path():
    assert [sft.resume_point(value) for value in ("true", "True", True, "false", None)] == [
        True,
        True,
        True,
        False,
        None,
    ]
    assert sft.resume_point("out/checkpoint-3") == "out/checkpoint-3"


def test_an_adapter_of_a_padded_embedding_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 261})).save_pretrained(tmp_path / "base")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), make_tokenizer()
    add_mask_token(tokenizer, model)  # to 320 rows
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    trainer = MarsSFTTrainer(
        model,
        MarsSFTConfig(str(tmp_path / "adapter"), max_steps=1, learning_rate=0.1, **quiet),
        train_dataset=Dataset.from_list([{"prompt": "hi", "completion": " -> ih"}] * 3),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    arguments = ["recipe", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")]
    monkeypatch.setattr(sys, "argv", arguments)
    merge_adapter.main()
    assert "Mask token <|mask|> (id 261)" in capsys.readouterr().out
    ids = torch.tensor([[70, 71, 261, 261, 72]])
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_prompts_are_plain_text_where_no_template_is():
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    prompts = ["hi", "a longer one"]
    chats = as_batch(tokenizer, prompts)
    raw = as_batch(tokenizer, prompts, raw=True)
    tokenizer.chat_template = tokenizer.pad_token = None
    plain = as_batch(tokenizer, prompts)
    assert tokenizer.batch_decode(plain["input_ids"], skip_special_tokens=True) == prompts
    assert plain["attention_mask"].sum(-1).tolist() == [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert plain["attention_mask"].tolist() == raw["attention_mask"].tolist()
    assert chats["input_ids"].shape[1] > plain["input_ids"].shape[1]


def test_final_answers_are_read_as_the_metric_reads_them():
    metric = _measure.FinalAnswer()
    replies = ["#### $18", "so 1,018\n#### 1,018.0", "18"]
    score = metric.compute(predictions=replies, references=["#### 18", "#### 1018", "#### 18"])
    assert score["accuracy"] == 2 / 3
    assert (score["low"], score["high"]) == _measure.wilson_interval(2, 3)
    with pytest.raises(ValueError, match="has no `#### number`"):
        metric.compute(predictions=["18"], references=["18"])
    with pytest.raises(SystemExit, match=r"answer of problem 2 of data\.jsonl has no `#### number`"):
        _measure.refuse_open_problems([ROW, {"question": "a?"}], "data.jsonl")


@pytest.mark.parametrize("recipe", [evaluate_gsm8k, lossless, benchmark_decoding, teaching_study, quickstart])
def test_counts_are_above_zero(recipe, monkeypatch: pytest.MonkeyPatch, capsys):
    needed = [] if recipe in (teaching_study, quickstart) else ["model", "--data", "data.jsonl"]
    flags = {teaching_study: "--mars_steps", quickstart: "--rounds", benchmark_decoding: "--batch_sizes"}
    flag = flags.get(recipe, "--batch_size")
    for value in ("0", "-1", "foo"):
        monkeypatch.setattr(sys, "argv", ["recipe", *needed, flag, value])
        with pytest.raises(SystemExit):
            recipe.parse_args()
        assert f"{flag}: '{value}' is not a whole number above 0" in capsys.readouterr().err


FLAGS = {benchmark_decoding: "--threshold", benchmark_vllm: "--thresholds", throttle: "--lowest"}


@pytest.mark.parametrize("recipe", [evaluate_gsm8k, lossless, benchmark_decoding, benchmark_vllm, throttle])
def test_thresholds_are_checked_before_any_work(recipe, monkeypatch: pytest.MonkeyPatch, capsys):
    flag, needed = FLAGS.get(recipe, "--mars_threshold"), [] if recipe is throttle else ["model"]
    for value in ("0", "-1", "1.5", "nan", "foo"):
        monkeypatch.setattr(sys, "argv", ["recipe", *needed, "--data", "data.jsonl", flag, value])
        with pytest.raises(SystemExit):
            recipe.parse_args()
        assert f"{flag}: '{value}' is not a number in (0, 1]" in capsys.readouterr().err


def test_a_throttle_has_a_range(monkeypatch: pytest.MonkeyPatch, capsys):
    command = ["recipe", "--data", "data.jsonl", "--highest", "0.8"]
    monkeypatch.setattr(sys, "argv", command)
    assert throttle.parse_args().lowest == 0.7
    monkeypatch.setattr(sys, "argv", [*command, "--lowest", "0.9"])
    with pytest.raises(SystemExit):
        throttle.parse_args()
    assert "--lowest 0.9 is above --highest 0.8" in capsys.readouterr().err


def test_repeated_thresholds_are_measured_once(monkeypatch: pytest.MonkeyPatch, capsys):
    command = ["recipe", "model", "--data", "data.jsonl", "--mars_threshold", "0.9", "1", "0.9", "1.0"]
    for recipe in (evaluate_gsm8k, lossless):
        monkeypatch.setattr(sys, "argv", command)
        assert recipe.parse_args().mars_threshold == [0.9, 1.0]
    monkeypatch.setattr(sys, "argv", [*command, "--mars_tree_budget", "auto", "8"])
    assert lossless.parse_args().mars_tree_budget == ["auto", 8]
    monkeypatch.setattr(sys, "argv", [*command, "--mars_tree_budget", "foo"])
    with pytest.raises(SystemExit):
        lossless.parse_args()
    assert "--mars_tree_budget: 'foo' is not" in capsys.readouterr().err


def test_the_small_llama_has_whole_heads():
    with pytest.raises(SystemExit, match="--hidden_size to a multiple, not to 16"):
        quickstart.make_model(make_tokenizer(), 16, 1)


def test_a_study_goes_on_and_takes_no_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, str, int]] = []
    most = 2

    def study(args, seed, way):
        if len(asked) == most:
            raise KeyboardInterrupt
        asked.append((seed, way, args.mars_steps))
        return {"accuracy at 1.0": 0.5}

    tables: list[list[dict]] = []
    monkeypatch.setattr(teaching_study, "study", study)
    monkeypatch.setattr(teaching_study, "to_table", lambda rows: tables.append(rows) or "")

    def start(*flags: str) -> None:
        asked.clear()
        arguments = ["recipe", "--output_dir", str(tmp_path), "--ways", "fixed", "random", *flags]
        monkeypatch.setattr(sys, "argv", arguments)
        teaching_study.main()

    with pytest.raises(KeyboardInterrupt):
        start("--seeds", "0", "1")
    most = 99
    start("--seeds", "0", "1")
    assert asked == [(1, "fixed", 150), (1, "random", 150)]
    start("--fast")
    assert asked == [(0, "fixed", 2), (0, "random", 2)]
    assert [len(rows) for rows in tables] == [4, 2]
    for flag in ("--mars_steps", "--ar_steps", "--eval_examples", "--block_size"):
        start("--seeds", "0", flag, "7")
        assert len(asked) == 2
    start("--seeds", "1")
    assert asked == []
    assert len(tables[-1]) == 4


def test_a_study_takes_no_half_trained_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained = []

    class Trainer:
        def __init__(self, model, args, **rest):
            self.folder = Path(args.output_dir)
            self.folder.mkdir(exist_ok=True)  # as `Trainer` does

        def train(self):
            trained.append(self.folder)
            if len(trained) == 1:
                raise KeyboardInterrupt

        def save_model(self):
            (self.folder / "config.json").write_text("{}")

    monkeypatch.setattr(teaching_study, "SFTTrainer", Trainer)
    monkeypatch.setattr(sys, "argv", ["recipe", "--fast", "--output_dir", str(tmp_path)])
    arguments = (teaching_study.parse_args(), 0, teaching_study.make_problems(4, 0), Dataset.from_list([ROW]))
    with pytest.raises(KeyboardInterrupt):
        teaching_study.train_start(*arguments)
    for _ in range(2):
        assert (teaching_study.train_start(*arguments) / "config.json").exists()
    assert len(trained) == 2


@pytest.mark.parametrize("config", [None, {"do_sample": True}])
def test_an_adapter_of_another_trainer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, config):
    (tmp_path / "adapter_config.json").write_text("{}")
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["recipe", str(tmp_path), "--output_dir", "out"])
    with pytest.raises(SystemExit):
        merge_adapter.main()
    assert "so MARS did not train it" in capsys.readouterr().err


def test_a_throttle_without_a_server_or_a_request_ends_in_one_line(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "data.jsonl").write_text(json.dumps(ROW))
    with socket.socket() as free:  # bound, and nobody listens there
        free.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = ["recipe", "--data", str(tmp_path / "data.jsonl"), "--server", server]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit, match=f"{server} does not answer: .*refused"):
            throttle.main()
    for flag, value in (("--rates", "0"), ("--phase_seconds", "-1"), ("--period", "nan"), ("--step", "0")):
        monkeypatch.setattr(sys, "argv", [*command, flag, value])
        with pytest.raises(SystemExit):
            throttle.main()
        assert f"{flag}: '{value}' is not a number above 0" in capsys.readouterr().err
    answers: list[throttle.Answer] = []
    monkeypatch.setattr(throttle.Load, "run", lambda load, of: answers)
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "a.png")])
    with pytest.raises(SystemExit, match="before a request was sent"):
        throttle.main()
    answers.append(throttle.Answer(sent=0.5, latency=2.0, threshold=1.0))
    throttle.main()
    assert "1 requests, latency median 2.00 s, 95% within 2.00 s" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_throttle_shows_what_a_server_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "model"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(400, {"error": "no such threshold"})

        def answer(self, status: int, body: dict) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args: object) -> None:
            pass

    loads = []
    start = throttle.Load.run
    monkeypatch.setattr(throttle.Load, "run", lambda load, *args: (loads.append(load), start(load, *args))[1])
    (tmp_path / "data.jsonl").write_text(json.dumps(ROW))
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        command = ["recipe", "--data", str(tmp_path / "data.jsonl"), "--server", address]
        monkeypatch.setattr(sys, "argv", [*command, "--phase_seconds", "0.5", "--rates", "20"])
        with pytest.raises(SystemExit, match=r"answers 400 Bad Request: .*no such threshold"):
            throttle.main()
        server.shutdown()
    assert [load.in_flight for load in loads] == [0]


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
