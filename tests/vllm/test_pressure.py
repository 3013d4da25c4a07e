"""The plug-in where room is short: prompts read in chunks, requests preempted, texts of the longest length."""

from __future__ import annotations

import pytest
from definition import decode
from serving import (
    BLOCK_SIZE,
    THRESHOLDS,
    generate,
    needs_vllm,
    prompts,
    reference,
    start_engine,
    stock_model,
    tokens,
    wanted,
)

pytestmark = needs_vllm
LONGEST = 352


@pytest.fixture(scope="module")
def engine():
    # 16 blocks of 32 tokens hold less than two of the longer requests; a step reads 90 tokens at most.
    return start_engine(
        max_model_len=LONGEST,
        max_num_seqs=6,
        max_num_batched_tokens=90,
        num_gpu_blocks_override=16,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )


def metric(engine, name: str) -> float:
    return sum(metric.value for metric in engine.get_metrics() if metric.name == name)


@pytest.mark.parametrize("setting", ["lossless", "1.0", *THRESHOLDS])
def test_tokens_survive_chunks_and_preemption(engine, setting):
    assert max(map(len, prompts())) > 3 * 90
    before = metric(engine, "vllm:num_preemptions")
    texts = tokens(generate(engine, prompts(), setting))
    assert metric(engine, "vllm:num_preemptions") > before
    # Two prompts leave less room than their answers would take.
    assert texts == [want[: LONGEST - len(prompt)] for prompt, want in zip(prompts(), wanted(setting), strict=True)]


def test_seeded_prompts_may_be_read_in_chunks(engine):
    longest = max(prompts(), key=len)
    alone = tokens(generate(engine, [longest], "lossless", temperature=1.5, seed=3))[0]
    both = generate(engine, [prompts()[0], longest, longest], "lossless", temperature=1.5, seed=3)
    assert tokens(both)[1:] == [alone, alone]


@pytest.mark.parametrize("setting", ["lossless", "0.5"])
def test_texts_reach_the_longest_length(engine, setting):
    prompt = (prompts()[-3] * 3)[: LONGEST - 21]
    tau = 1.0 if setting == "lossless" else float(setting)
    text = tokens(generate(engine, [prompt], setting, max_tokens=100, ignore_eos=True))[0]
    assert len(text) == 21
    assert text == decode(stock_model(), prompt, tau, -1, reference()["mask"], BLOCK_SIZE, 21)[0]
