"""Convert a MARS checkpoint to GGUF, and compare what llama.cpp says with transformers, greedy, one token at a time.

    pip install xllamacpp
    git clone --depth 1 https://github.com/ggml-org/llama.cpp
    python recipes/llama_cpp.py path/to/checkpoint --converter llama.cpp/convert_hf_to_gguf.py --data gsm8k/test.jsonl

The converter knows nothing of MARS: the checkpoint is one of its stock architecture. In float32 the texts should be
equal but where two logits are closer than the kernels agree.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
import xllamacpp
from _arguments import positive
from _problems import read_problems
from transformers import AutoModelForCausalLM, AutoTokenizer


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder of a checkpoint")
    parser.add_argument("--converter", type=Path, required=True, help="llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a `question`")
    parser.add_argument("--limit", type=positive, default=20, help="questions, from the first (default: 20)")
    parser.add_argument("--max_new_tokens", type=positive, default=48, help="(default: 48)")
    parser.add_argument("--output", type=Path, default=Path("mars.gguf"), help="(default: mars.gguf)")
    parser.add_argument("--outtype", default="f32", help="the converter's number format (default: f32)")
    return parser.parse_args()


def ask_transformers(folder: Path, prompts: list[str], max_new_tokens: int) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    replies = []
    # Without the penalty that a checkpoint may ask for, of which llama.cpp is told nothing.
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, **options)
        replies.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return replies


def ask_llama_cpp(path: Path, prompts: list[str], max_new_tokens: int) -> list[str]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 2048
    params.n_parallel = 1
    server = xllamacpp.Server(params)
    request = {"n_predict": max_new_tokens, "temperature": 0.0, "top_k": 1, "cache_prompt": False}
    answers = (server.handle_completions({"prompt": prompt, **request}) for prompt in prompts)
    return [answer["choices"][0]["text"] for answer in answers]


def main() -> None:
    args = parse_args()
    command = [sys.executable, args.converter, args.model, "--outfile", args.output, "--outtype", args.outtype]
    subprocess.run(command, check=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = [problem["question"] for problem in read_problems(args.data, args.limit)]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in questions
    ]
    ours = ask_transformers(args.model, prompts, args.max_new_tokens)
    theirs = ask_llama_cpp(args.output, prompts, args.max_new_tokens)
    for own, other in zip(ours, theirs, strict=True):
        print("same" if own == other else f"transformers: {own!r}\nllama.cpp:    {other!r}")
    print(f"{sum(map(str.__eq__, ours, theirs))} of {len(prompts)} replies are the same.")


if __name__ == "__main__":
    main()
