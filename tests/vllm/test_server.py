"""The plug-in behind vLLM's OpenAI server: mixed requests over HTTP, streams, JSON schemas, a load, `/metrics`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import CHECKPOINT, NEW_TOKENS, THRESHOLDS, extra, needs_vllm, prompts, reference, wanted

pytestmark = needs_vllm
SETTINGS = ("lossless", "1.0", *THRESHOLDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server that runs for the tests of this file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mars_hf.vllm.serve",
        CHECKPOINT,
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
    ]
    command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
    command += ["--block-size", "32", "--generation-config", "vllm"]
    # A tiny model would rather write white space than come to an end.
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(address: str, process: subprocess.Popen, log: Any) -> None:
    import requests

    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def post(server: str, path: str, body: dict[str, Any], **kwargs: Any) -> Any:
    import requests

    return requests.post(
        f"{server}/v1/{path}", json={"model": "tiny", "temperature": 0, **body}, timeout=300, **kwargs
    )


def complete(server: str, prompt: list[int], setting: str) -> list[int]:
    """The tokens of a completion."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "return_token_ids": True, "vllm_xargs": extra(setting)}
    response = post(server, "completions", body)
    assert response.ok, response.text
    return response.json()["choices"][0]["token_ids"]


def counters(server: str) -> dict[str, float]:
    import requests

    lines = requests.get(f"{server}/metrics", timeout=60).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name.split("{")[0]: float(value) for name, value in pairs if "_bucket" not in name}


def test_a_load_of_mixed_requests_loses_nothing(server):
    jobs = [(index % len(prompts()), SETTINGS[index // 3 % len(SETTINGS)]) for index in range(200)]
    before = counters(server)
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda job: complete(server, prompts()[job[0]], job[1]), jobs))
    assert texts == [wanted(setting)[index] for index, setting in jobs]
    assert not any(reference()["mask"] in text for text in texts)
    # The engine hears of the last requests' end in its next step.
    complete(server, prompts()[0], "lossless")
    after = counters(server)
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    count = sum(map(len, texts)) + len(wanted("lossless")[0])
    assert change["mars_generated_tokens_total"] == change["vllm:generation_tokens_total"] == count
    assert count > 1.4 * change["mars_request_forwards_total"]
    assert change["mars_request_tokens_per_forward_count"] >= 200


@pytest.mark.parametrize("setting", SETTINGS)
def test_streams_carry_the_same_text(server, setting):
    for case in reference()["cases"][:4]:
        body = {"messages": [{"role": "user", "content": case["question"]}], "max_tokens": NEW_TOKENS}
        body |= {"vllm_xargs": extra(setting)}
        whole = post(server, "chat/completions", body).json()["choices"][0]
        stream = post(server, "chat/completions", {**body, "stream": True}, stream=True)
        lines = [line[6:] for line in stream.iter_lines(decode_unicode=True) if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"]
        if setting == "0.5":
            assert len(choices) < len(case["wanted"]["0.5"][0])


def test_json_schema_holds(server):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Ben"]}, "things": {"enum": ["apples", "books"]}},
        "required": ["name", "things"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "purchase", "schema": schema}}
    for case in reference()["cases"][:3]:
        body = {
            "messages": [{"role": "user", "content": case["question"]}],
            "max_tokens": 100,
            "response_format": form,
        }
        texts = [
            post(server, "chat/completions", {**body, "vllm_xargs": extra(setting)}).json()["choices"][0]["message"][
                "content"
            ]
            for setting in ("1.0", "lossless", "0.5")
        ]
        assert set(json.loads(texts[0])) == {"name", "things"}
        assert texts == texts[:1] * 3


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [({"mars_threshold": 2}, "must be a number in (0, 1]"), ({"mars_thresold": 0.9}, "Unknown mars_thresold")],
)
def test_wrong_requests_are_answered_and_hurt_nobody(server, extra_args, message):
    response = post(server, "completions", {"prompt": prompts()[0], "vllm_xargs": extra_args})
    assert response.status_code == 400
    assert message in response.text
    assert complete(server, prompts()[0], "lossless") == wanted("lossless")[0]
