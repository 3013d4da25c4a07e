"""Time a MARS checkpoint in vLLM: autoregressive, by n-gram speculation, drafting for itself, and MARS, same prompts.

Runs in vLLM's environment (docs/vllm.md):

    python recipes/benchmark_vllm.py CHECKPOINT --data gsm8k/test.jsonl

For a checkpoint with blocks of 4: each engine drafts 3 tokens. Each is a process of its own, one after the other;
a setting is a value of `mars_threshold`, or "lossless". On cores that other work shares, `--clock cpu` with
OMP_NUM_THREADS=1 counts the seconds that the engine computed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _arguments import Distinct, positive, up_to_one
from _problems import read_problems

SPECULATION: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "n-gram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
    # vLLM's own way to draft with [MASK]s: the checkpoint once more, as the draft model of itself.
    "draft model": {
        "speculative_config": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "parallel_drafting": True,
        }
    },
    "MARS": {
        "worker_cls": "mars_hf.vllm.worker.MarsWorker",
        "speculative_config": {
            "method": "custom_class",
            "model": "mars_hf.vllm.proposer.MarsProposer",
            "num_speculative_tokens": 6,
        },
    },
}


def threshold_or_lossless(text: str) -> str:
    """A threshold as it is written, which is what the table calls it, or "lossless"."""
    if text != "lossless":
        try:
            up_to_one(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, nor 'lossless'") from error
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--data", type=Path, required=True, help='JSON lines with a "question" each')
    parser.add_argument(
        "--thresholds",
        type=threshold_or_lossless,
        nargs="+",
        action=Distinct,
        default=["lossless", "0.95", "0.9", "0.8"],
    )
    parser.add_argument(
        "--requests", type=positive, nargs="+", action=Distinct, default=[1, 16], help="at the same time"
    )
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--new_tokens", type=positive, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--engine", choices=SPECULATION, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """One engine: a line of JSON for each setting and number of requests."""
    from vllm import LLM, SamplingParams

    speculation = SPECULATION[args.engine]
    if args.engine == "draft model":
        speculation["speculative_config"]["model"] = args.checkpoint
    engine = LLM(
        args.checkpoint,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=max(args.requests),
        block_size=32,
        generation_config="vllm",
        enable_prefix_caching=False,
        enforce_eager=True,
        **speculation,
    )
    problems = read_problems(args.data, args.prompts)
    chats: list[Any] = [[{"role": "user", "content": problem["question"]}] for problem in problems]

    def counts() -> dict[str, int]:
        return engine.collective_rpc("mars_counts")[0] if args.engine == "MARS" else {"tokens": 0, "forwards": 0}

    def generate(count: int, setting: str, new_tokens: int) -> tuple[list[list[int]], float]:
        extra = {} if setting in ("-", "lossless") else {"mars_threshold": float(setting)}
        params = SamplingParams(temperature=0, max_tokens=new_tokens, extra_args=extra)
        clock = time.perf_counter if args.clock == "wall" else time.process_time
        start, texts = clock(), []
        for first in range(0, len(chats), count):
            outputs = engine.chat(chats[first : first + count], params, use_tqdm=False)
            texts += [list(output.outputs[0].token_ids) for output in outputs]
        return texts, clock() - start

    settings = args.thresholds if args.engine == "MARS" else ["-"]
    generate(max(args.requests), settings[0], 8)
    for count in args.requests:
        for setting in settings:
            before = counts()
            texts, seconds = generate(count, setting, args.new_tokens)
            after = counts()
            row = {
                "engine": args.engine,
                "setting": setting,
                "requests": count,
                "seconds": seconds,
                "texts": texts,
            }
            if args.engine == "MARS":
                tokens, forwards = (after[name] - before[name] for name in ("tokens", "forwards"))
                row["tokens_per_forward"] = tokens / forwards
            print("RESULT " + json.dumps(row), flush=True)


def main() -> None:
    args = parse_args()
    if args.engine is not None:
        measure(args)
        return
    rows = []
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
    for engine in SPECULATION:
        command = [sys.executable, *sys.argv, "--engine", engine]
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line[7:]) for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    print("| requests | engine | setting | tokens/s | against AR | tokens per forward | same text as AR |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for count in args.requests:
        of_count = [row for row in rows if row["requests"] == count]
        for row in of_count:
            speeds = [sum(map(len, r["texts"])) / r["seconds"] for r in (row, of_count[0])]
            same = sum(mine == ar for mine, ar in zip(row["texts"], of_count[0]["texts"], strict=True))
            per_forward = f"{row['tokens_per_forward']:.2f}" if "tokens_per_forward" in row else ""
            print(
                f"| {count} | {row['engine']} | {row['setting']} | {speeds[0]:.1f} | {speeds[0] / speeds[1]:.2f} | "
                f"{per_forward} | {same} of {len(row['texts'])} |"
            )


if __name__ == "__main__":
    main()
