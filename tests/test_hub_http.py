"""Pushing to, and loading from, a Hub on loopback, in processes of their own: its address is read at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, metadata_errors, serve_hub
from test_hub import bare_python  # noqa: F401  a fixture

TOKEN = "hf_write_token_of_the_tests"
TESTS = Path(__file__).parent

COMMON = """
import logging, sys, urllib.request
import torch
from transformers.utils import logging as transformers_logging
transformers_logging.set_verbosity_debug()
logging.getLogger("huggingface_hub").setLevel("DEBUG")
token, url, output = sys.argv[1:]
prompt = {"input_ids": torch.tensor([[72, 105, 74, 33]]), "max_new_tokens": 16, "do_sample": False}
result = {}
"""
PUSH = (
    COMMON
    + """
import json
from datasets import Dataset
from huggingface_hub import HfApi
from conftest import make_tokenizer
from test_hub import DATA, MODELS, QUIET
from mars_hf import AutoMarsModelForCausalLM, MarsSFTConfig, MarsSFTTrainer, get_mars_model

def break_hub(parts):
    urllib.request.urlopen(urllib.request.Request(f"{url}/break/{parts}", method="POST"))

args = MarsSFTConfig(
    "words",
    max_steps=1,
    mars_block_size=3,
    hub_token=token,
    hub_model_id="tester/words",
    hub_private_repo=True,
    **QUIET,
)
trainer = MarsSFTTrainer(
    MODELS["qwen2"](), args, train_dataset=Dataset.from_list(DATA), processing_class=make_tokenizer()
)
break_hub("upload")
for part in ("upload", "commit"):
    break_hub(part)
    try:
        trainer.push_to_hub()
    except Exception as error:
        result[f"broken {part}"] = f"{error} {error.__cause__}"
    result[f"files after broken {part}"] = HfApi().list_repo_files("tester/words", token=token)
break_hub("")
trainer.push_to_hub(dataset_name="owner/words")
result["first"] = HfApi().model_info("tester/words", token=token).sha
trainer.model.eval()
result["first tokens"] = trainer.model.generate(**prompt, mars_threshold=0.05).tolist()
trainer.train()
trainer.model.eval()
with torch.no_grad():
    for parameter in trainer.model.parameters():
        parameter.mul_(1.1)
trainer.push_to_hub(dataset_name="owner/words")
result["second tokens"] = trainer.model.generate(**prompt, mars_threshold=0.05).tolist()
trainer.model.push_to_hub("tester/model", token=token)
trainer.model.save_pretrained("again", push_to_hub=True, repo_id="tester/saved", token=token)
try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    pass
else:
    base = AutoMarsModelForCausalLM.from_pretrained("again")
    adapter = get_mars_model(get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")))
    adapter.save_pretrained("adapter", push_to_hub=True, repo_id="tester/adapter", token=token)
json.dump(result, open(output, "w"))
"""
)
LOAD = (
    COMMON
    + """
import json
from transformers import AutoTokenizer
from mars_hf import AutoMarsModelForCausalLM

def tokens(**options):
    model = AutoMarsModelForCausalLM.from_pretrained("tester/words", token=token, **options)
    return model.generate(**prompt, mars_threshold=0.05).tolist()

first, = [line for line in open("first")]
result["first"], result["second"] = tokens(revision=first), tokens()
result["mask token"] = AutoTokenizer.from_pretrained("tester/words", token=token).mask_token_id
for name, wrong in (("no token", {"token": None}), ("other token", {"token": "hf_of_somebody_else"})):
    try:
        AutoMarsModelForCausalLM.from_pretrained("tester/words", **wrong, force_download=True)
    except OSError as error:
        result[name] = str(error)
json.dump(result, open(output, "w"))
"""
)
LOAD_WITHOUT_LIBRARY = (
    COMMON
    + """
sys.modules["mars_hf"] = None
import json
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("tester/words", token=token, trust_remote_code=True)
result["second"] = model.generate(**prompt, mars_threshold=0.05).tolist()
json.dump(result, open(output, "w"))
"""
)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub({TOKEN: "tester", "hf_of_somebody_else": "other"}) as hub:
        yield hub


def run(hub: Hub, folder: Path, python: Path | str, name: str, script: str) -> tuple[dict, str]:
    """Run a script against the Hub: its results, and all that it wrote to the terminal."""
    home = folder / f"home of {name}"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "CI": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    environment.pop("HF_TOKEN", None)
    (folder / f"{name}.py").write_text(script)
    command = [python, f"{name}.py", TOKEN, hub.url, f"{name}.json"]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / f"{name}.json").read_text()), ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def pushed(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    folder = tmp_path_factory.mktemp("hub")
    return folder, *run(hub, folder, sys.executable, "push", PUSH)


def test_a_broken_upload_leaves_nothing_to_see(pushed: tuple[Path, dict, str]):
    _, result, _ = pushed
    for part in ("upload", "commit"):
        assert "403" in result[f"broken {part}"]
        assert result[f"files after broken {part}"] == []


def test_trainer_pushes_the_whole_checkpoint(hub: Hub, pushed: tuple[Path, dict, str]):
    repo = hub.repos["tester/words"]
    assert repo.private
    assert len(repo.commits) == 3  # none, and one for each push
    files = repo.commits[repo.branches["main"]]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert {"README.md", "chat_template.jinja", "custom_generate/generate.py"} <= set(files)
    card = files["README.md"].decode()
    assert metadata_errors(card) == []
    assert 'from_pretrained("tester/words")' in card
    assert "[owner/words]" in card
    validated = [body for method, path, _, body in hub.requests if path == "/api/validate-yaml"]
    assert validated


def test_model_pushes_its_part(hub: Hub, pushed: tuple[Path, dict, str]):
    for name in ("tester/model", "tester/saved"):
        repo = hub.repos[name]
        files = repo.commits[repo.branches["main"]]
        assert {"config.json", "model.safetensors", "custom_generate/generate.py", "README.md"} <= set(files)
        card = files["README.md"].decode()
        assert f'from_pretrained("{name}")' in card
        assert "- mars\n" in card
        assert metadata_errors(card) == []


def test_an_adapter_is_pushed_with_a_card_of_its_own(hub: Hub, pushed: tuple[Path, dict, str]):
    """PEFT leaves an empty form where there is no card, with the path that the base was loaded from."""
    pytest.importorskip("peft")
    repo = hub.repos["tester/adapter"]
    files = repo.commits[repo.branches["main"]]
    assert {"adapter_config.json", "adapter_model.safetensors", "generation_config.json", "README.md"} <= set(files)
    card = files["README.md"].decode()
    assert "- mars\n" in card
    assert 'from_pretrained("tester/adapter")' in card
    assert "Model Card for Model ID" not in card
    assert "again" not in card
    assert metadata_errors(card) == []


def test_load_by_name_revision_and_token(hub: Hub, pushed: tuple[Path, dict, str]):
    folder, wrote, _ = pushed
    (folder / "first").write_text(wrote["first"])
    result, log = run(hub, folder, sys.executable, "load", LOAD)
    assert result["first"] == wrote["first tokens"]
    assert result["second"] == wrote["second tokens"]
    assert result["first"] != result["second"]
    assert result["mask token"] == 261
    for name in ("no token", "other token"):
        assert "tester/words" in result[name]
    assert TOKEN not in log


def test_load_by_name_without_the_library(hub: Hub, pushed: tuple[Path, dict, str], bare_python: Path):  # noqa: F811
    folder, wrote, _ = pushed
    result, log = run(hub, folder, bare_python, "bare", LOAD_WITHOUT_LIBRARY)
    assert result["second"] == wrote["second tokens"]
    assert TOKEN not in log


def test_token_reaches_the_header_only(hub: Hub, pushed: tuple[Path, dict, str]):
    folder, _, log = pushed
    assert TOKEN not in log
    for repo in hub.repos.values():
        for files in repo.commits.values():
            assert not [path for path, data in files.items() if TOKEN.encode() in data]
    assert not [
        path for path in (folder / "words").rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    with_token = [headers for *_, headers, _ in hub.requests if TOKEN in str(headers)]
    assert with_token
    carriers = {name.lower() for headers in with_token for name, value in headers.items() if TOKEN in value}
    assert carriers == {"authorization"}
    assert not [path for _, path, _, body in hub.requests if TOKEN in path or TOKEN.encode() in body]
