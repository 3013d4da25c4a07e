"""Worked arithmetic in words, with answers that can be checked; a tokenizer for it and a small Llama to learn it."""

import random

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ("Tom", "Ada", "Mia", "Sam", "Eva", "Ben", "Zoe", "Max")
THINGS = ("apples", "books", "coins", "shells", "cards", "pens", "stamps", "eggs")
GAINS = ("buys {} more", "finds {} more", "is given {} more")
LOSSES = ("gives {} away", "loses {}", "sells {}")
# What can be said in more ways than one, the usual one first: here the model cannot know what comes next.
FIRST = ("Ones", "First the ones")
SECOND = ("Tens", "Then the tens")
CLOSINGS = (
    "{name} has {result} {thing} now.",
    "So {name} now has {result} {thing}.",
    "That makes {result} {thing} for {name}.",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def make_problems(count: int, seed: int) -> list[dict[str, str]]:
    """Problems as a `question` and a worked `answer` that ends in `#### result`; no question comes twice."""
    rng = random.Random(seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < count:
        problem = make_problem(rng)
        problems[problem["question"]] = problem
    return list(problems.values())


def make_problem(rng: random.Random) -> dict[str, str]:
    name, thing, gain = rng.choice(NAMES), rng.choice(THINGS), rng.random() < 0.5
    start = rng.randint(10, 89) if gain else rng.randint(10, 99)
    change = rng.randint(10, 99 - start if gain else start)
    result = start + change if gain else start - change
    event = rng.choice(GAINS if gain else LOSSES).format(change)
    (closing,) = rng.choices(CLOSINGS, weights=(6, 3, 1))
    closing = closing.format(name=name, thing=thing, result=result)
    return {
        "question": f"{name} has {start} {thing}. {name} {event}. How many {thing} does {name} have now?",
        "answer": f"{work_out(start, change, gain, rng)}\n{closing}\n#### {result}",
    }


def work_out(start: int, change: int, gain: bool, rng: random.Random) -> str:
    """A sum or a difference of two-digit numbers, column by column."""
    sign, word = ("+", "carry") if gain else ("-", "borrow")
    ones = start % 10 + change % 10 if gain else start % 10 - change % 10
    moved = ones > 9 or ones < 0
    lent = 10 if ones < 0 else 0
    result = start + change if gain else start - change
    (first,), (second,) = (rng.choices(words, weights=(8, 2)) for words in (FIRST, SECOND))
    return (
        f"{first}: {start % 10 + lent} {sign} {change % 10} = {ones + lent}, {word} {'1' if moved else 'nothing'}.\n"
        f"{second}: {start // 10} {sign} {change // 10}{f' {sign} 1' if moved else ''} = {result // 10}."
    )


def to_chat(problems: list[dict[str, str]]) -> Dataset:
    """TRL's conversational prompt-completion format."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem["question"]}],
                "completion": [{"role": "assistant", "content": problem["answer"]}],
            }
            for problem in problems
        ]
    )


def train_tokenizer(problems: list[dict[str, str]], vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the problems' text, a token for each digit, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    # As GPT-4's: words and signs take the space before them along, and no token spans two digits.
    words = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]|\s+| ?[^\sA-Za-z0-9]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|end|>", *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for problem in problems for text in problem.values()), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    if hidden_size % 32:
        raise SystemExit(f"The small Llama has heads of 32. Set --hidden_size to a multiple, not to {hidden_size}.")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # The usual 0.02 suits models that are ten times as wide; with it this one takes many times as long to learn.
        initializer_range=hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
