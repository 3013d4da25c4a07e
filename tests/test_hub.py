"""A saved MARS checkpoint, read by transformers, by the library, and by transformers with the repository's code."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import CHAT_TEMPLATE, SMALL, make_tokenizer
from datasets import Dataset
from decoding_models import brute_force, left_pad
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    pipeline,
)
from trl import SFTConfig

import mars_hf
from mars_hf import AutoMarsModelForCausalLM, MarsSFTConfig, MarsSFTTrainer, get_mars_model, record_results
from mars_hf.bundle import REQUIREMENTS, bundle
from mars_hf.hub import finish_card
from mars_hf.model_card import HEADING

ROOT = Path(__file__).parents[1]
TOKEN = "hf_secret_of_the_tests"
QUIET = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
WORDS = ["one and one is two", "hi", "two and two is four"]
DATA = [{"prompt": text, "completion": f" -> {text[::-1]}"} for text in WORDS]
# The tokenizer has 261 tokens, so [MASK] is 261: a spare row of the one, a new row of the other.
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 261})),
}


class Saved(NamedTuple):
    folder: Path
    trainer: MarsSFTTrainer


def train(model: object, folder: Path, **options: object) -> MarsSFTTrainer:
    """A trainer after one step, whose `create_model_card` and `save_model` have written what a push would upload."""
    peft_config = options.pop("peft_config", None)
    fields = {"max_steps": 1, "mars_block_size": 3, "hub_token": TOKEN, "logging_steps": 1, **QUIET, **options}
    args = MarsSFTConfig(str(folder), **fields)
    dataset = Dataset.from_list(DATA)
    dataset.info.download_checksums = {"hf://datasets/owner/words@123abc/data/train.parquet": {}}
    torch.manual_seed(0)
    trainer = MarsSFTTrainer(
        model(), args, train_dataset=dataset, processing_class=make_tokenizer(), peft_config=peft_config
    )
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="words")
    return trainer


@pytest.fixture(scope="module", params=sorted(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoints") / request.param
    return Saved(folder, train(MODELS[request.param], folder))


# Bases with a spare embedding row for [MASK], and without one.
@pytest.fixture(scope="module", params=sorted(MODELS))
def adapter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    peft = pytest.importorskip("peft")
    base = tmp_path_factory.mktemp("adapters") / "base"
    MODELS[request.param]().save_pretrained(base)
    folder = base.parent / "adapter"
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Saved(folder, train(lambda: AutoModelForCausalLM.from_pretrained(base), folder, peft_config=config))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a virtual environment that has what this one has, but not a package in development such as ours."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    # A path file inside these is not followed.
    (packages / "all.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin" / "python"


def inputs_of(saved: Saved) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(saved.folder)
    prompts = [torch.tensor(tokenizer(text).input_ids) for text in WORDS[:2]]
    return left_pad(prompts, pad=tokenizer.pad_token_id)


def test_folder_is_an_ordinary_checkpoint(saved: Saved):
    names = {path.name for path in saved.folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not {name for name in names if name.endswith((".bin", ".pt", ".py"))} - {"training_args.bin"}
    config = json.loads((saved.folder / "config.json").read_text())
    assert config["model_type"] == saved.folder.name
    assert config["architectures"] == [MODELS[saved.folder.name]().__class__.__name__]
    assert "auto_map" not in config
    tokenizer = AutoTokenizer.from_pretrained(saved.folder)
    assert tokenizer.mask_token == "<|mask|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert config["mask_token_id"] == tokenizer.mask_token_id == 261
    generation = json.loads((saved.folder / "generation_config.json").read_text())
    assert (generation["mars_block_size"], generation["mars_mask_token_id"]) == (3, 261)


PLAIN_READER = """
import sys
sys.modules["mars_hf"] = None  # even where it is installed for good
try:
    import mars_hf
except ImportError:
    pass
else:
    sys.exit("mars_hf can be imported")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline, set_seed

folder, inputs, output = sys.argv[1:]
inputs = torch.load(inputs, weights_only=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
plain = AutoModelForCausalLM.from_pretrained(folder)
assert "generate" not in vars(plain)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
options = {"max_new_tokens": 20, "do_sample": False}
ids, mask = inputs["input_ids"], {"attention_mask": inputs["attention_mask"]}
result = {"plain": plain.generate(**inputs, **options), "off": model.generate(ids, **mask, **options)}
for name, threshold in (("low", 1e-9), ("middle", 0.1), ("high", 1.0)):
    several = model.generate(**inputs, **options, mars_threshold=threshold, return_dict_in_generate=True)
    result[name], result[f"{name} forwards"] = several.sequences, several.num_forwards
result["lossless"] = model.generate(**inputs, **options, mars_lossless=True)
result["by repository"] = plain.generate(
    **inputs, **options, mars_threshold=0.1, custom_generate=folder, trust_remote_code=True
)
one = {name: value[:1] for name, value in inputs.items()}
result["streamed"] = model.generate(
    **one, **options, mars_threshold=0.1, streamer=TextStreamer(tokenizer), tokenizer=tokenizer, stop_strings=["\\n"]
)
set_seed(0)
result["sampled"] = model.generate(**inputs, max_new_tokens=20, do_sample=True, mars_threshold=0.1)
generator = pipeline("text-generation", model=folder, trust_remote_code=True)
result["pipeline"] = generator("one and", mars_threshold=0.1, return_full_text=False, **options)[0]["generated_text"]
try:
    model.generate(**inputs, mars_threshold=0.5, num_beams=2)
except ValueError as error:
    result["error"] = str(error)
model.save_pretrained(output + ".saved")
assert not [name for name in sys.modules if name.split(".")[0] == "mars_hf" and sys.modules[name] is not None]
torch.save(result, output)
"""


def test_three_readers_of_one_folder(saved: Saved, bare_python: Path, tmp_path: Path):
    inputs = inputs_of(saved)
    torch.save(inputs, tmp_path / "inputs")
    (tmp_path / "reader.py").write_text(PLAIN_READER)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    environment.pop("PYTHONPATH", None)
    command = [bare_python, "-W", "error", "reader.py", saved.folder, "inputs", "output"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    theirs = torch.load(tmp_path / "output", weights_only=True)

    model = AutoMarsModelForCausalLM.from_pretrained(saved.folder)
    plain = AutoModelForCausalLM.from_pretrained(saved.folder)
    options = {"max_new_tokens": 20, "do_sample": False}
    autoregressive = plain.generate(**inputs, **options)
    for name in ("plain", "off", "high", "lossless"):
        assert torch.equal(theirs[name], autoregressive), name
    for name, threshold in (("low", 1e-9), ("middle", 0.1)):
        ours = model.generate(**inputs, **options, mars_threshold=threshold, return_dict_in_generate=True)
        assert torch.equal(theirs[name], ours.sequences)
        assert theirs[f"{name} forwards"] == ours.num_forwards
        assert ours.tokens_per_forward.mean() > 1.2
        assert not torch.equal(ours.sequences, autoregressive)
    assert torch.equal(theirs["by repository"], theirs["middle"])
    prompt = inputs["input_ids"][1, inputs["attention_mask"][1] == 1]
    expected, _ = brute_force(plain, prompt, 0.1, window=3, max_new=20, eos=(), mask=261)
    row = theirs["middle"][1, inputs["input_ids"].shape[1] :].tolist()
    assert row[: len(expected)] == expected[: len(row)]
    assert "`num_beams > 1`" in theirs["error"]
    tokenizer = AutoTokenizer.from_pretrained(saved.folder)
    streamed = tokenizer.decode(theirs["streamed"][0])
    assert streamed in ran.stdout
    torch.manual_seed(0)
    assert torch.equal(
        theirs["sampled"], model.generate(**inputs, max_new_tokens=20, do_sample=True, mars_threshold=0.1)
    )
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = generator("one and", mars_threshold=0.1, return_full_text=False, **options)[0]["generated_text"]
    assert theirs["pipeline"] == text
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "output.saved")
    assert type(again) is type(plain)


def leave_trace(path: Path) -> str:
    return f"import pathlib\n\npathlib.Path({str(path)!r}).touch()\n"


def test_code_of_a_repository_runs_only_if_trusted(saved: Saved, tmp_path: Path):
    evil = tmp_path / "evil"
    saved.trainer.model.save_pretrained(evil)
    (evil / "custom_generate" / "generate.py").write_text(leave_trace(tmp_path / "ran") + "generate = print\n")
    for auto_class in (AutoModelForCausalLM, AutoMarsModelForCausalLM):
        model = auto_class.from_pretrained(evil)
        model.generate(**inputs_of(saved), max_new_tokens=2)
        assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="brings its own `generate`"):
        AutoMarsModelForCausalLM.from_pretrained(evil, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_the_library_goes_before_the_code_of_a_checkpoint(saved: Saved):
    model = AutoModelForCausalLM.from_pretrained(saved.folder, trust_remote_code=True)
    inputs = inputs_of(saved)
    options = {"max_new_tokens": 12, "do_sample": False, "mars_threshold": 0.1}
    theirs = model.generate(**inputs, **options)
    assert get_mars_model(model) is model
    assert "generate" not in vars(model)
    assert type(model).generate is mars_hf.MarsGenerationMixin.generate
    assert torch.equal(model.generate(**inputs, **options), theirs)
    trusted = AutoMarsModelForCausalLM.from_pretrained(saved.folder, trust_remote_code=True)
    assert "generate" not in vars(trusted)


def test_bundle_holds_the_decoding_half_and_asks_for_what_the_library_asks():
    files = bundle()
    assert "def generate(" in files["generate.py"]
    assert {"generation.py", "decoding.py", "cache.py", "masks.py"} <= set(files)
    assert not {"sft_trainer.py", "losses.py", "hub.py", "collator.py", "modeling.py"} & set(files)
    for name, text in files.items():
        if name.endswith(".py"):
            assert not re.findall(r"^\s*(?:from|import) (?:trl|datasets|accelerate|mars_hf)", text, re.MULTILINE)
            siblings = re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE)
            assert {f"{sibling}.py" for sibling in siblings} <= set(files)
    installed = (ROOT / "setup.cfg").read_text()
    for requirement in REQUIREMENTS.split():
        assert f"    {requirement}," in installed


def test_save_pretrained_of_a_model_alone(saved: Saved, tmp_path: Path):
    model = AutoMarsModelForCausalLM.from_pretrained(saved.folder)
    model.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "custom_generate" / "generate.py").is_file()
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["mask_token_id"] == 261
    plain = get_mars_model(MODELS["qwen2"]())
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "custom_generate").exists()


def code_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


def test_card_of_the_trainer(saved: Saved):
    card = ModelCard.load(saved.folder / "README.md")
    data = card.data
    assert {"mars", "trl", "sft", "text-generation"} <= set(data.tags)
    assert data.datasets == ["owner/words"]
    assert (data.library_name, data.pipeline_tag, data.model_name) == ("transformers", "text-generation", "words")
    assert data.base_model is None
    assert "None" not in card.content
    assert "## Training procedure" in card.text
    assert "tokens_per_forward@0.95" in card.text
    assert HEADING in card.text


def test_example_of_the_card_runs_in_three_lines(saved: Saved, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(saved.folder.parent)
    block = code_blocks((saved.folder / "README.md").read_text())[0]
    statements = [line for line in block.splitlines() if line and not line.startswith("from mars_hf import")]
    assert len(statements) == 3
    scope: dict = {}
    *setup, call = block.strip().splitlines()
    exec("\n".join(setup), scope)
    reply = eval(call.replace("128", "8"), scope)[0]["generated_text"][-1]
    assert reply["role"] == "assistant"


def test_measured_figures_go_into_the_card(saved: Saved, tmp_path: Path):
    saved.trainer.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"README.md does not exist"):
        record_results(tmp_path, "gsm8k", [])
    (tmp_path / "README.md").write_text((saved.folder / "README.md").read_text())
    rows = [
        {"setting": None, "tokens_per_forward": 1.0, "accuracy": 0.5, "speedup": 1.0},
        {"setting": 0.9, "tokens_per_forward": 1.731, "accuracy": 0.48},
        {"setting": "lossless", "tokens_per_forward": 2.4},
    ]
    for _ in range(2):  # the second time replaces the first
        record_results(tmp_path, "openai/gsm8k", rows)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.count("| 0.9 | 1.73 | 48.0% |") == 1
    assert "| lossless | 2.40 |  |" in card.text
    assert "## Training procedure" in card.text
    results = {(result.metric_name, result.metric_value) for result in card.data.eval_results}
    assert ("accuracy at mars_threshold=0.9", 0.48) in results
    assert ("tokens_per_forward at mars_threshold=0.9", 1.731) in results
    assert ("tokens_per_forward without MARS", 1.0) in results
    assert ("tokens_per_forward with mars_lossless", 2.4) in results
    assert len(results) == 5
    record_results(tmp_path, "openai/gsm8k", [{"setting": 0.8, "tokens_per_forward": 1.9}], split="train")
    record_results(tmp_path, "owner/other", [{"setting": 0.8, "tokens_per_forward": 1.4}])
    record_results(tmp_path, "openai/gsm8k", rows[1:])
    card = ModelCard.load(tmp_path / "README.md")
    places = [
        card.text.index(f"On {name}.\n") for name in ("openai/gsm8k, train", "owner/other, test", "openai/gsm8k, test")
    ]
    assert places == sorted(places)
    assert card.text.count("\nOn ") == 3
    assert card.text.count("| 0.8 | 1.90 |  |") == card.text.count("| 0.9 | 1.73 | 48.0% |") == 1
    assert card.text.count("## Training procedure") == card.text.count("## Measured") == 1
    of = [(result.dataset_name, result.dataset_split) for result in card.data.eval_results]
    assert (len(of), of.count(("openai/gsm8k", "train")), of.count(("owner/other", "test"))) == (5, 1, 1)
    for row in ({"setting": 0.9}, {"setting": 0.9, "tokens_per_forward": 1.0, "accuracy": 48}):
        with pytest.raises(ValueError, match=r"`accuracy`|needs"):
            record_results(tmp_path, "gsm8k", [row])


def test_measured_figures_stay_as_long_as_the_weights_do(tmp_path: Path):
    trainer = train(MODELS["qwen2"], tmp_path)
    record_results(tmp_path, "openai/gsm8k", [{"setting": 0.9, "tokens_per_forward": 1.731, "accuracy": 0.48}])
    trainer.create_model_card(model_name="other")  # as `push_to_hub` does
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.model_name == "other"
    assert "| 0.9 | 1.73 | 48.0% |" in card.text
    assert card.text.count("## Measured") == card.text.count("## Training procedure") == 1
    assert len(card.data.eval_results) == 2
    trainer.train()  # to the same step, with other weights
    trainer.create_model_card(model_name="other")
    card = ModelCard.load(tmp_path / "README.md")
    assert "## Measured" not in card.text
    assert not card.data.eval_results


def test_a_folder_is_no_base_model(saved: Saved, tmp_path: Path):
    model = get_mars_model(MODELS["qwen2"](), mask_token_id=261, block_size=3)
    wanted = {str(tmp_path / "gone"): None, "../gone": None, "a/b/c": None, "owner/base": "owner/base", "gpt2": "gpt2"}
    for name, base in wanted.items():
        model.config._name_or_path = name
        (tmp_path / "README.md").unlink(missing_ok=True)
        finish_card(model, tmp_path, "owner/name")
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.base_model == base
        assert base is not None or name not in card.content


def test_a_card_written_by_hand_keeps_its_text(saved: Saved, tmp_path: Path):
    text = "# Mine\n\nMy own words.\n"
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\ntags:\n- mine\n---\n\n{text}")
    for _ in range(2):
        finish_card(saved.trainer.model, tmp_path, "owner/name")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.strip() == text.strip()
    assert (card.data.license, card.data.tags) == ("mit", ["mine", "mars"])


def test_no_token_in_what_is_pushed(saved: Saved, adapter: Saved):
    for folder in (saved.folder, adapter.folder):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert (folder / "training_args.bin") in files
        assert not [path.name for path in files if TOKEN.encode() in path.read_bytes()]
    assert saved.trainer.args.hub_token == TOKEN
    assert pickle.loads(pickle.dumps(saved.trainer.args)).hub_token is None
    for made in (copy.copy(saved.trainer.args), copy.deepcopy(saved.trainer.args)):
        assert made.hub_token == TOKEN
        assert type(made) is MarsSFTConfig


@dataclasses.dataclass
class OwnConfig(SFTConfig):
    """As many a training script has."""


def test_no_token_of_an_own_class_of_arguments(tmp_path: Path):
    args = OwnConfig(str(tmp_path), max_steps=1, hub_token=TOKEN, **QUIET)
    data = Dataset.from_list(DATA)
    trainer = MarsSFTTrainer(MODELS["llama"](), args, train_dataset=data, processing_class=make_tokenizer())
    trainer.save_model()
    pickled = (tmp_path / "training_args.bin").read_bytes()
    assert b"OwnConfig" in pickled
    assert TOKEN.encode() not in pickled
    assert trainer.args.hub_token == args.hub_token == TOKEN


def test_card_of_an_adapter_outlives_another_save(adapter: Saved, tmp_path: Path):
    card = adapter.folder / "README.md"
    before = card.read_text()
    adapter.trainer.save_model()
    assert card.read_text() == before
    assert str(adapter.folder.parent) not in before
    # A card by hand is PEFT's to change.
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\nby hand\n")
    adapter.trainer.model.save_pretrained(tmp_path)
    assert "by hand" in (tmp_path / "README.md").read_text()


def test_card_has_the_figures_of_the_best_step(tmp_path: Path):
    name = "eval_mask_accuracy"
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # The worst, that is: the last of four is no better than the others for sure.
    worst = {"load_best_model_at_end": True, "metric_for_best_model": name, "greater_is_better": False}
    options = {"max_steps": 4, "learning_rate": 5.0, "optim": "sgd", "warmup_steps": 3}
    args = MarsSFTConfig(str(tmp_path), mars_block_size=3, **{**QUIET, **each, **worst, **options})
    data, tokenizer = Dataset.from_list(DATA), make_tokenizer()
    torch.manual_seed(0)
    trainer = MarsSFTTrainer(
        MODELS["llama"](), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    figures = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
    best = trainer.state.best_global_step
    assert best < 4
    assert figures[best] != figures[4]
    trainer.create_model_card()
    assert f"| {name} | {figures[best]:.3g} |" in (tmp_path / "README.md").read_text()


ADAPTERS = {
    "dora": {"use_dora": True},
    "dora on the embedding": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]},
    "on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "beside the embedding": {"modules_to_save": ["embed_tokens"]},
    "beside both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows only": {},
}


# PEFT, when it saves an adapter on the embedding.
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as embedding layers found:UserWarning")
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("rows", [261, 272])
def test_adapters_load_as_they_were_trained(rows: int, kind: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": rows})).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **ADAPTERS[kind]})
    options = {"peft_config": config, "learning_rate": 0.1}
    trainer = train(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter", **options)
    ids = torch.tensor([[70, 71, 261, 261, 72]])
    # A new row of the head that no adapter holds is drawn anew; no text has the token.
    expected = trainer.model.eval()(ids).logits[..., :261]
    if kind == "rows only":
        # As PEFT does where the base is one of the Hub and there is no way to it.
        trainer.model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    logits = AutoMarsModelForCausalLM.from_pretrained(tmp_path / "adapter")(ids).logits[..., :261]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_adapter(adapter: Saved, tmp_path: Path):
    trained = adapter.trainer.model
    inputs = inputs_of(adapter)
    options = {"max_new_tokens": 12, "do_sample": False, "mars_threshold": 0.1}
    trained.eval()
    expected = trained.generate(**inputs, **options)
    loaded = AutoMarsModelForCausalLM.from_pretrained(adapter.folder)
    assert (loaded.generation_config.mars_mask_token_id, loaded.generation_config.mars_block_size) == (261, 3)
    # What ends a text and fills a row is that of the training, not of the base.
    tokenizer, base = make_tokenizer(), GenerationConfig.from_pretrained(adapter.folder.parent / "base")
    stops = loaded.generation_config.eos_token_id
    assert tokenizer.eos_token_id in stops
    assert stops == trained.generation_config.eos_token_id != base.eos_token_id
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id != base.pad_token_id
    assert torch.equal(loaded.generate(**inputs, **options), expected)
    assert type(trained).__name__ == "PeftModelForCausalLM"
    trained.save_pretrained(tmp_path)
    assert (tmp_path / "custom_generate" / "generate.py").is_file()
    assert json.loads((tmp_path / "generation_config.json").read_text())["mars_block_size"] == 3
    card = ModelCard.load(adapter.folder / "README.md")
    assert card.data.library_name == "peft"
    assert {"mars", "trl", "sft"} <= set(card.data.tags)
    assert str(tmp_path.parent.parent) not in card.content


def put_into_cache(cache: Path, repo: str, revision: str, folder: Path) -> None:
    """What a download of a repository at a branch leaves in a cache."""
    at = cache / f"models--{repo.replace('/', '--')}"
    commit = hashlib.sha1(f"{repo} {revision}".encode()).hexdigest()
    shutil.copytree(folder, at / "snapshots" / commit)
    (at / "refs").mkdir(exist_ok=True)
    (at / "refs" / revision).write_text(commit)


def test_revision_of_an_adapter_is_not_that_of_its_base(adapter: Saved, tmp_path: Path):
    base, folder = adapter.folder.parent / "base", tmp_path / "adapter"
    shutil.copytree(adapter.folder, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "owner/base"}))
    put_into_cache(tmp_path, "owner/base", "main", base)
    put_into_cache(tmp_path, "owner/adapter", "trained", folder)
    offline = {"cache_dir": tmp_path, "local_files_only": True}
    ids = torch.tensor([[70, 71, 72]])
    expected = adapter.trainer.model.eval()(ids).logits
    for options in ({"revision": "trained"}, {"adapter_kwargs": {"revision": "trained"}}):
        model = AutoMarsModelForCausalLM.from_pretrained("owner/adapter", **options, **offline)
        torch.testing.assert_close(model(ids).logits[..., :261], expected[..., :261], rtol=1e-5, atol=1e-5)
        assert model.generation_config.mars_mask_token_id == 261
    # Where the adapter has a revision of its own, the other one is the base's.
    put_into_cache(tmp_path, "owner/base", "first", base)
    shutil.rmtree(tmp_path / "models--owner--base" / "snapshots")
    put_into_cache(tmp_path, "owner/base", "second", base)
    options = {"revision": "second", "adapter_kwargs": {"revision": "trained"}}
    model = AutoMarsModelForCausalLM.from_pretrained("owner/adapter", **options, **offline)
    assert torch.equal(model(ids).logits[..., :261], expected[..., :261])


@pytest.mark.parametrize("by", ["adapter_kwargs", "subfolder"])
@pytest.mark.parametrize("kind", ["dora", "beside the embedding"])
def test_adapter_in_a_subfolder(kind: str, by: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 261})).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **ADAPTERS[kind]})
    folder = tmp_path / "out" / "checkpoint-1"
    options = {"peft_config": config, "learning_rate": 0.1}
    trainer = train(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder, **options)
    ids = torch.tensor([[70, 71, 261, 261, 72]])
    expected = trainer.model.eval()(ids).logits[..., :261]
    where = {"subfolder": "checkpoint-1"} if by == "subfolder" else {"adapter_kwargs": {"subfolder": "checkpoint-1"}}
    model = AutoMarsModelForCausalLM.from_pretrained(tmp_path / "out", **where)
    torch.testing.assert_close(model(ids).logits[..., :261], expected, rtol=1e-5, atol=1e-5)
    assert (model.generation_config.mars_mask_token_id, model.generation_config.mars_block_size) == (261, 3)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))
    with pytest.raises(ValueError, match="pickle"):
        AutoMarsModelForCausalLM.from_pretrained(tmp_path / "out", **where)
    assert not (tmp_path / "trace").exists()


def test_an_adapter_beside_the_subfolder_is_left_alone(adapter: Saved, tmp_path: Path):
    model = MODELS["qwen2"]()
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "adapter_config.json").write_bytes((adapter.folder / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))
    loaded = AutoMarsModelForCausalLM.from_pretrained(tmp_path, subfolder="whole")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not (tmp_path / "trace").exists()


@pytest.fixture
def authors_checkpoint(tmp_path: Path) -> Iterator[Path]:
    """A folder as the paper's authors save it: Qwen2 under their own model type, [MASK] in the tokenizer only."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|mask|>"]})
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = MODELS["qwen2"]()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(model_type="a2d-qwen2", architectures=["A2DQwen2LMHeadModel"])
    config["auto_map"] = {"AutoConfig": "modeling.A2DQwen2Config", "AutoModelForCausalLM": "modeling.A2DQwen2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling.py").write_text(leave_trace(tmp_path / "ran"))
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def test_checkpoint_of_the_authors(authors_checkpoint: Path):
    model = AutoMarsModelForCausalLM.from_pretrained(authors_checkpoint)
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.generation_config.mars_mask_token_id == len(make_tokenizer())
    prompt = torch.tensor([[5, 6, 7, 8]])
    output = model.generate(prompt, max_new_tokens=12, do_sample=False, mars_threshold=0.05)
    expected, accepted = brute_force(model, prompt[0], 0.05, max_new=12, eos=(), mask=261)
    assert output[0, 4:].tolist() == expected
    assert max(accepted) > 1
    model.save_pretrained(authors_checkpoint / "again")
    again = AutoModelForCausalLM.from_pretrained(authors_checkpoint / "again")
    assert type(again) is Qwen2ForCausalLM
    assert json.loads((authors_checkpoint / "again" / "config.json").read_text())["mask_token_id"] == 261


def test_unknown_types_are_as_unknown_as_to_transformers(authors_checkpoint: Path):
    config = json.loads((authors_checkpoint / "config.json").read_text())
    del config["auto_map"]
    for model_type in ("a2d-nothing", "b2d-qwen2"):
        (authors_checkpoint / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        with pytest.raises(ValueError, match=model_type):
            AutoMarsModelForCausalLM.from_pretrained(authors_checkpoint)


def test_mask_token_of_the_model_config(tmp_path: Path):
    model = MODELS["qwen2"]()
    model.config.mask_token_id = 265
    model.save_pretrained(tmp_path)
    assert AutoMarsModelForCausalLM.from_pretrained(tmp_path).generation_config.mars_mask_token_id == 265


def test_pipeline_passes_the_arguments_through(saved: Saved):
    model = AutoMarsModelForCausalLM.from_pretrained(saved.folder)
    tokenizer = AutoTokenizer.from_pretrained(saved.folder, padding_side="left")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 20, "do_sample": False}
    texts = {}
    for threshold in (1e-9, 0.1, 1.0):
        output = model.generate(**tokenizer("one and", return_tensors="pt"), **options, mars_threshold=threshold)
        texts[threshold] = tokenizer.decode(output[0], skip_special_tokens=True)
        assert generator("one and", mars_threshold=threshold, **options)[0]["generated_text"] == texts[threshold]
    assert texts[1e-9] != texts[1.0]
    two = generator(["one and", "a longer prompt"], batch_size=2, mars_threshold=0.1, **options)
    assert two[0][0]["generated_text"] == texts[0.1]
    built = pipeline("text-generation", model=model, tokenizer=tokenizer, mars_threshold=0.1, **options)
    assert built("one and")[0]["generated_text"] == texts[0.1]
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        generator("one and", mars_threshold=2.0)


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_no_pickle_is_loaded(name: str, adapter: Saved, tmp_path: Path):
    source = adapter.folder if name.startswith("adapter") else adapter.folder.parent / "base"
    for path in source.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))
    with pytest.raises((OSError, ValueError), match="safetensors"):
        AutoMarsModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pickle"):
        AutoMarsModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "trace").exists()
