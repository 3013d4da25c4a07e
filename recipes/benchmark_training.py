"""What a training step costs: `SFTTrainer`, `MarsSFTTrainer`, and the paper's form with both streams whole.

    python recipes/benchmark_training.py --model path/to/model --gsm8k path/to/gsm8k/train.jsonl

Every form takes a step on the same batch before any takes the next, so that whatever else the machine does falls on
all alike; figures are medians over the steps. The floor is (tokens of both streams that the loss needs) / (tokens of
one).
Memory is the peak during a step, of one model with its gradients and optimizer; on CPU, where glibc must be the C
library, it is that of the process, and says little for batches of a few megabytes. `--fast` is a check that it runs.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _arguments import Distinct, positive
from _problems import read_problems
from _turns import by_turns
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from mars_hf import MarsSFTConfig, MarsSFTTrainer, mars_attention_mask

KINDS = ("prompt-heavy", "chat", "all tokens")
Step = Callable[[list[dict[str, Any]]], float]


def make_rows(
    kind: str, problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> list[dict[str, list[int]]]:
    """Tokenized rows: a question and its scored answer; three such turns of a chat; or one with every token scored."""
    turns = 3 if kind == "chat" else 1
    rows = []
    for start in range(0, len(problems) - turns + 1, turns):
        messages: list[dict[str, str]] = []
        ids: list[int] = []
        labels: list[int] = []
        for problem in problems[start : start + turns]:
            for role, key in (("user", "question"), ("assistant", "answer")):
                messages.append({"role": role, "content": problem[key]})
                whole = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=role == "user", return_dict=True
                )["input_ids"]
                is_scored = role == "assistant" or kind == "all tokens"
                labels += whole[len(ids) :] if is_scored else [-100] * (len(whole) - len(ids))
                ids = whole
        rows.append({"input_ids": ids[: args.max_length], "labels": labels[: args.max_length]})
    return [row for row in rows if any(label != -100 for label in row["labels"])]


class Memory:
    """The peak of what is in use, from `reset` on, in bytes."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def reset(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            # What the allocator keeps for later is not in use: without this the first form would pay for all.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is in use
            self.start = self._status("VmRSS")

    def peak(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.on_gpu else self._status("VmHWM")) - self.start

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def make_trainer(trainer_class: Any, args: argparse.Namespace, rows: list[dict[str, list[int]]]) -> SFTTrainer:
    options: dict[str, Any] = {"mars_block_size": args.block_size} if trainer_class is MarsSFTTrainer else {}
    config = (MarsSFTConfig if trainer_class is MarsSFTTrainer else SFTConfig)(
        output_dir="/tmp/benchmark_training",
        report_to="none",
        bf16=False,
        use_cpu=args.device == "cpu",
        gradient_checkpointing=args.gradient_checkpointing,
        max_length=args.max_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=1e-6,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, attn_implementation=args.attention)
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # what `train` would set
    trainer.model.train()
    return trainer


def paper_loss(trainer: SFTTrainer, examples: list[dict[str, Any]], mask_token_id: int, block_size: int) -> Any:
    """Both streams whole, every position through the head, the mask of (2L, 2L) for all rows."""
    batch = trainer._prepare_inputs(trainer.data_collator(examples))
    ids, labels = batch["input_ids"], batch["labels"]
    length = ids.shape[1]
    is_target = (labels != -100) & (torch.arange(length, device=ids.device) > 0)
    both = torch.cat([ids, ids.masked_fill(is_target, mask_token_id)], dim=1)
    mask = mars_attention_mask(length, block_size).to(ids.device).expand(len(ids), 1, -1, -1)
    positions = torch.arange(length, device=ids.device).repeat(len(ids), 2)
    logits = trainer.model(both, attention_mask=mask, position_ids=positions, use_cache=False).logits
    predictions = logits.unflatten(1, (2, length))[:, :, :-1].flatten(0, 2).float()
    targets = labels.masked_fill(~is_target, -100)[:, None, 1:].expand(-1, 2, -1).flatten()
    return torch.nn.functional.cross_entropy(predictions, targets, reduction="sum") / is_target.sum()


def make_steps(args: argparse.Namespace, rows: list[dict[str, list[int]]]) -> tuple[dict[str, Step], MarsSFTTrainer]:
    """A whole training step of each form, which returns its loss."""
    sft, mars = make_trainer(SFTTrainer, args, rows), make_trainer(MarsSFTTrainer, args, rows)
    mask_token_id = mars.model.generation_config.mars_mask_token_id
    vocabulary = sft.model.get_input_embeddings().weight.shape[0]

    def finish(trainer: SFTTrainer, loss: torch.Tensor) -> float:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss.item()

    def collated(trainer: SFTTrainer) -> Step:
        def step(examples: list[dict[str, Any]]) -> float:
            return finish(trainer, trainer.training_step(trainer.model, trainer.data_collator(examples)))

        return step

    def paper(examples: list[dict[str, Any]]) -> float:
        # Any row of the embedding costs the same; this model was not given one for the mask token.
        loss = paper_loss(sft, examples, min(mask_token_id, vocabulary - 1), args.block_size)
        loss.backward()
        return finish(sft, loss)

    return {"SFTTrainer": collated(sft), "MarsSFTTrainer": collated(mars), "paper, 2L": paper}, mars


def measure(args: argparse.Namespace, kind: str, rows: list[dict[str, list[int]]]) -> None:
    steps, mars = make_steps(args, rows)
    device = mars.args.device
    memory = Memory(device)
    # Weights and the two moments of AdamW; gradients come and go within a step.
    resident = 3 * sum(p.numel() * p.element_size() for p in mars.model.parameters())
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, list[int]] = {name: [] for name in steps}
    needed, clean = 0, 0
    for number in range(args.warmup + args.steps):
        start = number * args.batch_size % max(1, len(rows) - args.batch_size + 1)
        examples = rows[start : start + args.batch_size]
        if number >= args.warmup:
            streams = mars.data_collator(examples)["stream_ids"]
            needed, clean = needed + int((streams >= 0).sum()), clean + int((streams == 0).sum())
        for name in by_turns(list(steps), number):
            memory.reset()
            begin = time.perf_counter()
            steps[name](examples)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= args.warmup:
                seconds[name].append(time.perf_counter() - begin)
                peaks[name].append(memory.peak() + resident)
    for name in steps:
        ratio = statistics.median(s / base for s, base in zip(seconds[name], seconds["SFTTrainer"], strict=True))
        memory_ratio = statistics.median(p / base for p, base in zip(peaks[name], peaks["SFTTrainer"], strict=True))
        print(
            f"| {kind:12} | {name:14} | {statistics.median(seconds[name]):8.3f} | {ratio:5.2f} | "
            f"{needed / clean:5.2f} | {statistics.median(peaks[name]) / 2**30:6.2f} | {memory_ratio:6.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model with a chat template")
    parser.add_argument("--gsm8k", required=True, help="JSON lines with `question` and `answer`")
    parser.add_argument(
        "--kinds", nargs="+", action=Distinct, choices=KINDS, default=list(KINDS), help="kinds of data (default: all)"
    )
    parser.add_argument("--block_size", type=positive, default=4)
    parser.add_argument("--batch_size", type=positive, default=8)
    parser.add_argument("--max_length", type=positive, default=1024)
    parser.add_argument("--steps", type=positive, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of the model")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fast", action="store_true", help="two short batches of two rows")
    args = parser.parse_args()
    if args.fast:
        args.batch_size, args.max_length, args.steps, args.warmup = 2, 160, 2, 1
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    count = 3 * args.batch_size * (args.steps + args.warmup)
    problems = read_problems(Path(args.gsm8k), count, ("question", "answer"))
    print("| data         | form           | s / step | times | floor | GiB    | times  |")
    print("| ------------ | -------------- | -------- | ----- | ----- | ------ | ------ |")
    for kind in args.kinds:
        rows = make_rows(kind, problems, tokenizer, args)
        if len(rows) < args.batch_size:
            raise SystemExit(
                f"{len(rows)} examples of {kind} with a scored token do not fill a batch of {args.batch_size}. "
                "Raise --max_length, or lower --batch_size."
            )
        measure(args, kind, rows)


if __name__ == "__main__":
    main()
