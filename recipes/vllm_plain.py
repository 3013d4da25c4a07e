"""Compare what vLLM says from a MARS checkpoint, as the autoregressive model it is, with transformers: greedy.

No plug-in is used. vLLM and `mars_hf` need different versions of transformers, so it takes two environments
(docs/vllm.md), one after the other:

    python recipes/vllm_plain.py ask CHECKPOINT --data gsm8k/test.jsonl --replies replies.json
    VLLM_PYTHON recipes/vllm_plain.py compare CHECKPOINT --replies replies.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from _arguments import positive
from _problems import read_problems


def ask(args: argparse.Namespace) -> None:
    """Let stock transformers reply, and keep the prompts beside the replies, as token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=args.dtype)
    replies = []
    for problem in read_problems(args.data, args.limit):
        chat = [{"role": "user", "content": problem["question"]}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        length = inputs["input_ids"].shape[1]
        # Without the penalty that a checkpoint may ask for: vLLM is told to read nothing of the generation config.
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
        output = model.generate(**inputs, **options)[0].tolist()
        replies.append({"prompt": output[:length], "reply": output[length:]})
    args.replies.write_text(json.dumps({"stop": model.generation_config.eos_token_id, "replies": replies}))


def compare(args: argparse.Namespace) -> None:
    """Let vLLM reply to the same prompts, and print where it says something else."""
    from vllm import LLM, SamplingParams

    kept = json.loads(args.replies.read_text())
    stops = kept["stop"] if isinstance(kept["stop"], list) else [kept["stop"]]
    engine = LLM(
        args.checkpoint,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=4,
        block_size=32,
        generation_config="vllm",
        gpu_memory_utilization=args.memory,
        enforce_eager=True,
    )
    same = 0
    for number, row in enumerate(kept["replies"]):
        params = SamplingParams(temperature=0, max_tokens=len(row["reply"]), stop_token_ids=stops)
        prompt: Any = {"prompt_token_ids": row["prompt"]}
        reply = list(engine.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
        same += reply == row["reply"]
        if reply != row["reply"]:
            print(f"{number}: transformers {row['reply']}\n{number}: vLLM         {reply}")
    print(f"{same} of {len(kept['replies'])} replies are the same, token for token.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("ask", "compare"))
    parser.add_argument("checkpoint", help="the folder of a checkpoint")
    parser.add_argument("--replies", type=Path, required=True, help="where transformers' replies are kept")
    parser.add_argument("--data", type=Path, help='JSON lines with a "question" each, for `ask`')
    parser.add_argument("--limit", type=positive, default=20, help="questions, from the first (default: 20)")
    parser.add_argument("--max_new_tokens", type=positive, default=32, help="(default: 32)")
    parser.add_argument("--dtype", default="float32", help="(default: float32)")
    parser.add_argument("--memory", type=float, default=0.15, help="share of memory for vLLM (default: 0.15)")
    args = parser.parse_args()
    if args.do == "ask" and args.data is None:
        parser.error("`ask` needs --data.")
    {"ask": ask, "compare": compare}[args.do](args)


if __name__ == "__main__":
    main()
