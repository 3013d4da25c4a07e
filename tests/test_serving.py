"""A MARS checkpoint behind OpenAI-style requests: by `python -m mars_hf.serve`, and by `transformers serve` alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import torch
from conftest import make_tokenizer
from decoding_models import save_checkpoint
from transformers import GenerationConfig

from mars_hf import AutoMarsModelForCausalLM

for module in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(module)

QUESTION = [{"role": "user", "content": "one and one"}]
LOW, DEFAULT = 1e-9, 0.3
UNFINISHED = "\ufffd"
# Of the checkpoint.
POSITIONS = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("serving") / "model")


def start(command: list[str], log: Path, port: int) -> subprocess.Popen:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return process
        except (URLError, ConnectionError):
            time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module", params=["library", "transformers alone"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[str]:
    """The address of a server of the checkpoint, and in its last part which kind it is."""
    port = free_port()
    options = [str(checkpoint), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    if request.param == "library":
        command = [sys.executable, "-m", "mars_hf.serve", *options, "--mars-threshold", str(DEFAULT)]
    else:
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", *options, "--trust-remote-code"]
    process = start(command, checkpoint.parent / f"{request.param}.log", port)
    yield f"http://127.0.0.1:{port}#{request.param}"
    process.terminate()
    process.wait(30)


def ask(server: str, generation: dict | str | None = None, path: str = "chat/completions", **fields: Any) -> Any:
    body: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, **fields}
    body |= {"messages": QUESTION} if path == "chat/completions" else {"prompt": "one and one"}
    if generation is not None:
        body["generation_config"] = generation if isinstance(generation, str) else json.dumps(generation)
    request = Request(f"{server.partition('#')[0]}/v1/{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=120) as response:
        if not fields.get("stream"):
            return json.load(response)
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
        return [json.loads(event) for event in events]


def text_of(answer: Any) -> str:
    if isinstance(answer, list):
        return "".join(choice["delta"].get("content") or "" for event in answer for choice in event["choices"])
    return answer["choices"][0]["message"]["content"]


def expected(checkpoint: Path, **options: Any) -> str:
    model = AutoMarsModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = make_tokenizer()
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False, **options)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_threshold_per_request(server: str, checkpoint: Path, stream: bool):
    wanted = {threshold: expected(checkpoint, mars_threshold=threshold) for threshold in (LOW, 0.5, 1.0)}
    assert wanted[LOW] != wanted[1.0]
    for threshold, text in wanted.items():
        answer = ask(server, {"mars_threshold": threshold}, stream=stream)
        # These bytes are no text, and a stream never shows the first bytes of a character that does not come.
        assert text_of(answer).rstrip(UNFINISHED) == text.rstrip(UNFINISHED)
        usage = (answer[-1] if stream else answer)["usage"]
        assert usage["completion_tokens"] == ask(server, {"mars_threshold": threshold})["usage"]["completion_tokens"]
    lossless = {"mars_lossless": True, "mars_threshold": None}
    if not server.endswith("library"):
        reply = text_of(ask(server, lossless, stream=stream))
        assert reply.rstrip(UNFINISHED) == wanted[1.0].rstrip(UNFINISHED)


def test_threshold_of_the_server(server: str, checkpoint: Path):
    options = {"mars_threshold": DEFAULT} if server.endswith("library") else {}
    assert text_of(ask(server)) == expected(checkpoint, **options)


def test_completions(server: str):
    texts = {
        threshold: ask(server, {"mars_threshold": threshold}, path="completions")["choices"][0]["text"]
        for threshold in (LOW, 1.0)
    }
    assert texts[LOW] != texts[1.0]


@pytest.mark.parametrize(
    ("generation", "status", "message"),
    [
        ({"mars_threshold": 2}, 400, "in (0, 1]"),
        ({"mars_threshold": 0.9, "num_beams": 2}, 400, "num_beams"),
        ({"mars_threshold": "high"}, 400, "must be a number"),
        ({"mars_threshold": 0.9, "mars_cache": "paged"}, 400, "mars_cache"),
        ({"mars_treshold": 0.9}, 400, "mars_treshold"),
        ({"mars_threshold": 0.9, "use_cache": False}, 400, "use_cache=False"),
        ({"mars_threshold": [0.9, 0.8]}, 400, "mars_threshold"),
        ("mars_threshold=0.9", 422, "JSON"),
        ("[1]", 422, "JSON object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_refusals_are_answered(server: str, generation: dict | str, status: int, message: str, stream: bool):
    if not server.endswith("library"):
        pytest.skip("transformers alone answers these with 500, or not at all")
    with pytest.raises(HTTPError) as raised:
        ask(server, generation, stream=stream)
    assert raised.value.code == status
    assert message in raised.value.read().decode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_of_no_given_length_takes_the_room_that_is_left(server: str, stream: bool):
    if not server.endswith("library"):
        pytest.skip("transformers alone asks for 1024 tokens")
    answer = ask(server, max_tokens=None, stream=stream)
    usage = (answer[-1] if stream else answer)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] <= POSITIONS
    with pytest.raises(HTTPError) as raised:
        ask(server, max_tokens=POSITIONS, stream=stream)
    assert raised.value.code == 400
    assert "max_position_embeddings" in raised.value.read().decode()


def test_threshold_of_the_server_is_checked_when_it_starts(checkpoint: Path):
    command = [sys.executable, "-m", "mars_hf.serve", str(checkpoint), "--mars-threshold", "2", "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode != 0
    assert "in (0, 1]" in ran.stderr


@pytest.mark.parametrize("option", ["--continuous-batching", "--compile"])
def test_other_loops_are_refused(checkpoint: Path, option: str):
    command = [sys.executable, "-m", "mars_hf.serve", str(checkpoint), option, "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode != 0
    assert f"`{option}`" in ran.stderr


def test_length_of_the_checkpoint_counts(checkpoint: Path):
    """A request with a `generation_config` leaves the length to the checkpoint's own."""
    from mars_hf.serve import prepare_request

    model = AutoMarsModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.max_new_tokens = POSITIONS
    inputs, request = {"input_ids": torch.tensor([[3, 4, 5]])}, GenerationConfig(mars_threshold=0.8)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        prepare_request(model, inputs, request)
    model.generation_config.max_new_tokens = POSITIONS - 3
    prepare_request(model, inputs, request)


def test_a_model_that_cannot_is_refused_when_it_is_loaded(checkpoint: Path, tmp_path: Path):
    """By a server with a threshold: without one, only requests that ask for MARS are."""
    from mars_hf.serve import MarsModelManager

    model = AutoMarsModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.mars_mask_token_id = 272
    model.save_pretrained(tmp_path / "wrong")
    manager = MarsModelManager(device="cpu")
    assert manager._load_model(f"{tmp_path / 'wrong'}@main")
    manager.mars_threshold = 0.9
    assert manager._load_model(f"{checkpoint}@main")
    with pytest.raises(ValueError, match="`mars_mask_token_id` is 272, and the model has 272 tokens"):
        manager._load_model(f"{tmp_path / 'wrong'}@main")
