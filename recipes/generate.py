"""Generate text with a MARS checkpoint; the text goes to stdout, the figures to stderr.

python recipes/generate.py mars-quickstart "Tom has 37 apples. Tom buys 25 more. How many apples does Tom have now?"
python recipes/generate.py path/or/repo --file prompts.txt --mars_threshold 0.8
python recipes/generate.py path/or/repo "Write a haiku." --mars_lossless --temperature 0.7
echo "Write a haiku." | python recipes/generate.py path/or/repo --mars_threshold 1.0
"""

import argparse
import sys
import time
from pathlib import Path

from _arguments import positive, up_to_one
from _load import DTYPES, as_batch, load_checkpoint
from transformers import TextStreamer


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint: a folder or a name on the Hub")
    parser.add_argument("prompts", nargs="*", help="prompts; without them they are read from --file or stdin")
    parser.add_argument("--file", type=Path, help="a file with one prompt a line")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--mars_threshold", type=up_to_one, help="in (0, 1]; lower is faster (default: 0.9)")
    mode.add_argument("--mars_lossless", action="store_true", help="the tokens of plain decoding, in fewer passes")
    parser.add_argument("--temperature", type=float, help="sample at this temperature (default, and 0: greedy)")
    parser.add_argument("--mars_block_size", type=positive, help="tokens per step at most (default: as trained)")
    parser.add_argument("--max_new_tokens", type=positive, default=256, help="(default: 256)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="(default: that of the checkpoint)")
    parser.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    args = parser.parse_args()
    if args.prompts and args.file:
        parser.error("prompts are given twice, in the command and in --file")
    if args.file and not args.file.is_file():
        parser.error(f"--file: {args.file} is not a file")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts:
        return args.prompts
    text = args.file.read_text(encoding="utf-8") if args.file else sys.stdin.read()
    # Not `splitlines`: it also splits at signs that a prompt may have inside.
    return [line for line in text.split("\n") if line.strip()]


def main() -> None:
    args = parse_args()
    prompts = read_prompts(args)
    if not prompts:
        sys.exit("No prompt given.")
    model, tokenizer = load_checkpoint(args.model, args.dtype)
    inputs = as_batch(tokenizer, prompts, args.raw).to(model.device)
    one = len(prompts) == 1
    started = time.perf_counter()
    output = model.generate(
        **inputs,
        mars_threshold=0.9 if args.mars_threshold is None and not args.mars_lossless else args.mars_threshold,
        mars_lossless=args.mars_lossless,
        mars_block_size=args.mars_block_size,
        max_new_tokens=args.max_new_tokens,
        do_sample=bool(args.temperature),
        temperature=args.temperature or None,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if one else None,
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - started
    if not one:
        replies = tokenizer.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print("\n\n".join(f"> {prompt}\n{reply}" for prompt, reply in zip(prompts, replies, strict=True)))
    tokens = int(output.accepted_lengths.sum())
    print(
        f"{tokens} tokens, {output.tokens_per_forward.mean():.2f} tokens per forward, {tokens / seconds:.1f} tokens/s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
