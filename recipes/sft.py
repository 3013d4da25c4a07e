"""Supervised fine-tuning with MARS, with the flags of TRL's own `sft.py` and those of MARS (`--mars_block_size` ...).

A model and a dataset from the Hub:

    python recipes/sft.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/Capybara \
        --learning_rate 2e-5 --per_device_train_batch_size 8 --output_dir Qwen2.5-0.5B-MARS

A local file of questions and answers, with LoRA:

    python recipes/sft.py \
        --model_name_or_path path/to/model --dataset_name gsm8k/train.jsonl \
        --prompt_column question --completion_column answer \
        --use_peft --learning_rate 2e-4 --output_dir model-MARS
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from mars_hf import MarsSFTConfig, MarsSFTTrainer


@dataclass
class ColumnArguments:
    """Where prompts and completions stand in a dataset that is in none of TRL's formats."""

    prompt_column: str | None = field(
        default=None,
        metadata={
            "help": "Column that holds the prompts, `question` for GSM8K. Rows become prompt-completion examples, as "
            "a user's and an assistant's message where the tokenizer has a chat template, as plain text where not. "
            "Not needed for datasets in a format of TRL's. Also takes `--completion_column`."
        },
    )
    completion_column: str | None = field(
        default=None, metadata={"help": "Column that holds the completions, `answer` for GSM8K."}
    )

    def __post_init__(self) -> None:
        if (self.prompt_column is None) != (self.completion_column is None):
            raise SystemExit("--prompt_column and --completion_column go together. Set both or neither.")


def load_splits(script_args: ScriptArguments, mixture_args: DatasetMixtureConfig) -> Any:
    """The splits of the dataset: a mixture, a local JSON (lines) file, or what `load_dataset` takes by its name."""
    if mixture_args.datasets:
        return get_dataset(mixture_args)
    if not script_args.dataset_name:
        raise SystemExit("There is nothing to train on. Set --dataset_name, or `datasets` in a config file.")
    path = Path(script_args.dataset_name)
    if (path.stat().st_size == 0) if path.is_file() else path.suffix in (".json", ".jsonl"):
        raise SystemExit(f"{path} is not a file, or an empty one. Set --dataset_name to a file of JSON lines.")
    if path.is_file():
        return load_dataset("json", data_files=script_args.dataset_name, streaming=script_args.dataset_streaming)
    return load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )


def get_split(splits: Any, name: str, flag: str) -> Any:
    """A split of the dataset, by the name that a flag gives."""
    if name not in splits:
        raise SystemExit(f"The dataset has no split {name!r} but {', '.join(splits)}. Set --{flag}.")
    return splits[name]


def column_names(split: Any) -> list[str]:
    """The columns of a split; a stream does not always know its own."""
    return split.column_names or list(next(iter(split), {}))


def check_columns(split: Any, columns: ColumnArguments, text_field: str) -> None:
    """Say which flags are missing for a dataset that is in none of TRL's formats."""
    names = column_names(split)
    if columns.prompt_column:
        known = {columns.prompt_column, columns.completion_column} <= set(names)
    else:
        formats = ({"input_ids"}, {"messages"}, {"conversations"}, {"prompt", "completion"}, {text_field})
        known = any(format <= set(names) for format in formats)
    if not known:
        raise SystemExit(
            f"The dataset has the columns {', '.join(names) or '(none)'}. Say where prompts and completions stand, "
            "for example --prompt_column question --completion_column answer, or where whole texts do, with "
            "--dataset_text_field. A dataset in a format of TRL's needs neither."
        )


def to_prompt_completion(dataset: Any, prompt_column: str, completion_column: str, chat: bool) -> Any:
    """Turn two columns of text into TRL's prompt-completion format."""

    def convert(row: dict[str, str]) -> dict[str, Any]:
        prompt, completion = row[prompt_column], row[completion_column]
        if not chat:
            return {"prompt": prompt, "completion": completion}
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": completion}],
        }

    # None of the other columns is left: TRL would take one named `text` for the text to train on.
    return dataset.map(convert, remove_columns=column_names(dataset))


def load_tokenizer(model_args: ModelConfig, training_args: MarsSFTConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that the flags, and before them `model_init_kwargs`, name; both get its arguments."""
    if not model_args.model_name_or_path:
        raise SystemExit("There is no model to train. Set --model_name_or_path, to a folder or a name on the Hub.")
    training_args.model_init_kwargs = kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=kwargs["revision"],
        trust_remote_code=kwargs.get("trust_remote_code", training_args.trust_remote_code),
    )


def resume_point(value: str | bool | None) -> str | bool | None:
    """What `train` takes for --resume_from_checkpoint: a path, or True for the last checkpoint of the output."""
    return {"true": True, "false": False}.get(str(value).lower(), value)


def main() -> None:
    parser = TrlParser((ScriptArguments, MarsSFTConfig, ModelConfig, DatasetMixtureConfig, ColumnArguments))
    script_args, training_args, model_args, mixture_args, columns = parser.parse_args_and_config()
    tokenizer = load_tokenizer(model_args, training_args)
    splits = load_splits(script_args, mixture_args)
    train, evaluation = get_split(splits, script_args.dataset_train_split, "dataset_train_split"), None
    if training_args.eval_strategy != "no":
        evaluation = get_split(splits, script_args.dataset_test_split, "dataset_test_split")
    check_columns(train, columns, training_args.dataset_text_field)
    if columns.prompt_column:
        chat = bool(tokenizer.chat_template or training_args.chat_template_path)
        names = (columns.prompt_column, columns.completion_column)
        train = to_prompt_completion(train, *names, chat)
        if evaluation is not None:
            check_columns(evaluation, columns, training_args.dataset_text_field)
            evaluation = to_prompt_completion(evaluation, *names, chat)
    trainer = MarsSFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=resume_point(training_args.resume_from_checkpoint))
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.print(f"Model and tokenizer saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub()  # the card names the dataset if it came from the Hub
    trainer.end()


if __name__ == "__main__":
    main()
