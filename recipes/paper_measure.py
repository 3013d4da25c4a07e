"""Let a checkpoint answer problems in one way of decoding; time batches and training steps."""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import torch
from _load import as_batch
from _measure import GREEDY, stop_ids, until_stop
from _store import Record, Store
from _turns import by_turns
from paper_settings import BATCH, SYSTEMS, Decoding, Row
from paper_systems import Lab, Problems
from transformers import BatchEncoding

from mars_hf.baselines import block_diffusion_generate, jacobi_generate
from mars_hf.metrics import gsm8k_match, prefix_agreement

# transformers decodes with these one prompt at a time.
SINGLE = ("prompt_lookup", "speculative")
PROMPT_LOOKUP_TOKENS = 4
# Greedy decoding as the model's logits have it: some checkpoints come with a penalty, which Jacobi does not know.
PLAIN = {**GREEDY, "repetition_penalty": 1.0}


class Bench:
    """Measures rows of some systems and writes them to the store; what is there is not measured again."""

    def __init__(self, lab: Lab, store: Store, systems: list[str]) -> None:
        self.lab, self.store, self.scale, self.systems = lab, store, lab.scale, systems
        self.loaded: tuple[str, Any] = ("", None)
        self.loaded_draft: tuple[int, Any] = (-1, None)

    def load(self, system: str, seed: int) -> tuple[Any, Any]:
        """Model and tokenizer; the last ones stay in memory, since the rows of a system follow each other."""
        name = f"{system}-{seed}"
        if self.loaded[0] != name:
            self.loaded = (name, self.lab.load(system, seed, for_generation=True))
        return self.loaded[1]

    def key(self, row: Row, seed: int) -> str:
        """What tells a record from others: whatever its figures depend on."""
        scale, method = self.scale, row.decoding.method
        parts = [self.lab.fingerprint(row.system, seed)]
        if method == "speculative":
            parts.append(self.lab.fingerprint("draft", seed))
        examples = min(scale.eval_examples, scale.single_examples) if method in SINGLE else scale.eval_examples
        parts += [row.decoding.key, scale.eval_data, str(examples), str(scale.max_new_tokens)]
        return "/".join([*parts, f"seed{seed}"])

    def row(self, row: Row, seed: int) -> Record:
        """The record of a row: per problem, whether it is right, tokens, forwards, agreement with plain decoding."""
        key = self.key(row, seed)
        if key in self.store:
            return self.store[key]
        problems = self.lab.problems(seed)
        if row.decoding.method in SINGLE:
            problems = problems[: self.scale.single_examples]
        plain = None
        if row.decoding.method not in ("stock", "block_diffusion") and row.decoding != Decoding("mars", 1.0):
            plain = self.row(Row(row.system), seed)["ids"]
        model, tokenizer = self.load(row.system, seed)
        self.lab.say(f"Answering with {row.system}, {row.decoding.key}, seed {seed}")
        size = 1 if row.decoding.method in SINGLE else self.scale.eval_batch_size
        replies: list[tuple[list[int], int]] = []
        for batch in to_batches(tokenizer, problems, size, model.device):
            replies += self.answer(model, tokenizer, batch, row, seed)
        ids, forwards = [reply for reply, _ in replies], [count for _, count in replies]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        right = [gsm8k_match(text, problem["answer"]) for text, problem in zip(texts, problems, strict=True)]
        extra: dict[str, Any] = {"ids": ids} if row.decoding.method == "stock" else {}
        if plain is not None:
            # Rows of one prompt at a time answer the first few only.
            extra["agreement"] = [prefix_agreement(*pair) for pair in zip(ids, plain, strict=False)]
        return self.store.add(
            key,
            system=row.system,
            decoding=row.decoding.key,
            seed=seed,
            strict=[int(strict) for strict, _ in right],
            flexible=[int(flexible) for _, flexible in right],
            tokens=[len(reply) for reply in ids],
            forwards=forwards,
            **extra,
        )

    def answer(
        self, model: Any, tokenizer: Any, batch: BatchEncoding, row: Row, seed: int
    ) -> list[tuple[list[int], int]]:
        """New tokens and forward passes of each row of a batch."""
        decoding, limit, stops = row.decoding, self.scale.max_new_tokens, stop_ids(model)
        calls = 0

        def count(*args: Any) -> None:
            nonlocal calls
            calls += 1

        hook = model.register_forward_hook(count)
        try:
            output = self.generate(model, tokenizer, batch, decoding, SYSTEMS[row.system].block_size, limit, seed)
        finally:
            hook.remove()
        sequences = output.sequences[:, batch["input_ids"].shape[1] :].tolist()
        ids = [until_stop(sequence, stops) for sequence in sequences]
        if decoding.method == "stock":
            return [(reply, len(reply)) for reply in ids]
        if decoding.method in SINGLE:
            return [(ids[0], calls)]
        return list(zip(ids, (output.accepted_lengths > 0).sum(-1).tolist(), strict=True))

    def generate(
        self,
        model: Any,
        tokenizer: Any,
        batch: BatchEncoding,
        decoding: Decoding,
        block_size: int,
        limit: int,
        seed: int = 0,
    ) -> Any:
        """One call of whatever decodes."""
        method = decoding.method
        if method == "block_diffusion":
            return block_diffusion_generate(
                model,
                batch["input_ids"],
                batch["attention_mask"],
                mask_token_id=tokenizer.mask_token_id,
                block_size=block_size,
                max_new_tokens=limit,
                threshold=decoding.threshold or 1.0,
            )
        if method == "jacobi":
            return jacobi_generate(model, batch["input_ids"], batch["attention_mask"], max_new_tokens=limit)
        options: dict[str, Any] = {}
        if method == "mars":
            cache, _, size = decoding.cache.partition("-")
            options = {
                "mars_threshold": decoding.threshold,
                "mars_confidence": decoding.confidence,
                "mars_cache": cache,
                **({"mars_cache_block_size": int(size)} if size else {}),
            }
        elif method == "lossless":
            options = {"mars_lossless": True}
        elif method == "prompt_lookup":
            options = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        elif method == "speculative":
            options = {"assistant_model": self.draft(seed)}
        return model.generate(**batch, **options, **PLAIN, max_new_tokens=limit, return_dict_in_generate=True)

    def draft(self, seed: int) -> Any:
        """The draft model of speculative decoding."""
        if self.loaded_draft[0] != seed:
            self.loaded_draft = (seed, self.lab.load("draft", seed, for_generation=True)[0])
        return self.loaded_draft[1]

    def batches(self, system: str, seed: int, size: int) -> Record:
        """Seconds of each way of `BATCH` on the same batches, in turns; per way, round and batch."""
        scale = self.scale
        key = f"{self.key(Row(system), seed)}/batch-{size}/{scale.timed_examples}x{scale.timed_rounds}"
        if key in self.store:
            return self.store[key]
        model, tokenizer = self.load(system, seed)
        self.lab.say(f"Timing batches of {size}")
        problems = self.lab.problems(seed)[: scale.timed_examples]
        batches = list(to_batches(tokenizer, problems, size, model.device))
        block_size, stops = SYSTEMS[system].block_size, stop_ids(model)
        seconds: dict[str, list[float]] = {decoding.key: [] for decoding in BATCH}
        tokens: dict[str, list[int]] = {decoding.key: [] for decoding in BATCH}
        for decoding in BATCH:  # the first call of each pays for what later ones find ready
            self.generate(model, tokenizer, batches[0], decoding, block_size, scale.max_new_tokens)
        for number in range(scale.timed_rounds):
            for batch in batches:
                for decoding in by_turns(BATCH, number):
                    started = time.perf_counter()
                    output = self.generate(model, tokenizer, batch, decoding, block_size, scale.max_new_tokens)
                    sequences = output.sequences.tolist()  # waits for the accelerator, if there is one
                    seconds[decoding.key].append(time.perf_counter() - started)
                    width = batch["input_ids"].shape[1]
                    tokens[decoding.key].append(sum(len(until_stop(row[width:], stops)) for row in sequences))
        return self.store.add(key, system=system, seed=seed, batch_size=size, seconds=seconds, tokens=tokens)

    def costs(self, systems: tuple[str, ...], seed: int, steps: int = 12) -> Record:
        """Seconds and tokens of training steps of each system on the same examples, in turns."""
        key = f"steps/{self.lab.fingerprint('ar', seed)}/{'+'.join(systems)}/{steps}"
        if key in self.store:
            return self.store[key]
        self.lab.say("Timing training steps")
        trainers = {}
        for name in systems:
            model, tokenizer = self.lab.load("ar", seed)
            work = self.lab.folder / "cost"
            examples = (steps + 1) * self.scale.per_device_batch_size
            trainers[name] = self.lab.trainer(SYSTEMS[name], seed, model, tokenizer, work, examples)
        loaders = {name: cycle(trainer.get_train_dataloader()) for name, trainer in trainers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        tokens: dict[str, list[int]] = {name: [] for name in systems}
        prepared = {}
        for name, trainer in trainers.items():
            prepared[name] = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
            trainer.current_gradient_accumulation_steps = 1  # what `train` would set
        for number in range(steps + 1):
            for name, trainer in trainers.items():
                model, optimizer = prepared[name]
                (batch,), targets = trainer.get_batch_samples(loaders[name], 1, trainer.args.device)
                width = int(batch["input_ids"].ne(trainer.processing_class.pad_token_id).sum())
                started = time.perf_counter()
                trainer.training_step(model, batch, targets)
                optimizer.step()
                optimizer.zero_grad()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if number:  # the first step pays for what later ones find ready
                    seconds[name].append(time.perf_counter() - started)
                    tokens[name].append(width)
        return self.store.add(key, seed=seed, seconds=seconds, tokens=tokens)


def to_batches(tokenizer: Any, problems: Problems, size: int, device: Any) -> Any:
    """Chats padded on the left, so many at a time."""
    for i in range(0, len(problems), size):
        yield as_batch(tokenizer, [problem["question"] for problem in problems[i : i + size]]).to(device)
