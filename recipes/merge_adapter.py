"""Merge a LoRA adapter that `MarsSFTTrainer` trained into an ordinary checkpoint, and check that nothing is lost.

    python recipes/merge_adapter.py path/to/adapter --output_dir merged

Prints how far training moved the mask token's embedding, and how far the merged checkpoint's logits, as plain
transformers reads them back, are from the adapter's.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

from mars_hf import AutoMarsModelForCausalLM, add_mask_token, get_mars_model


def initial_row(base: str, tokenizer_path: Path, dtype: str, seed: int) -> torch.Tensor:
    """The embedding of the mask token before training, which the trainer draws with its seed."""
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    mask_token_id = add_mask_token(AutoTokenizer.from_pretrained(tokenizer_path), model, pad_to_multiple_of=None)
    return model.get_input_embeddings().weight[mask_token_id].detach()


def trained_rows(adapter: Path, dtype: str) -> int:
    """The rows of the embedding that an adapter was trained with."""
    return AutoMarsModelForCausalLM.from_pretrained(adapter, dtype=dtype).get_input_embeddings().weight.shape[0]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--dtype", default="float32", help="(default: float32)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the training (default: 42)")
    parser.add_argument("--text", default="What is 12 times 12?", help="where the logits are compared")
    args = parser.parse_args()

    if not (args.adapter / "adapter_config.json").is_file():
        parser.error(f"{args.adapter} holds no adapter_config.json: give the output folder of a LoRA training.")
    path = args.adapter / "generation_config.json"
    if not path.is_file() or "mars_mask_token_id" not in json.loads(path.read_text()):
        parser.error(
            f"{args.adapter} has no generation_config.json that names a mask token, so MARS did not train it: for an "
            "adapter of `SFTTrainer`, PEFT's own `merge_and_unload` will do."
        )
    tokenizer = AutoTokenizer.from_pretrained(args.adapter)
    origin = PeftConfig.from_pretrained(args.adapter)
    base_name = origin.base_model_name_or_path
    # Before the model is there, so that memory holds no third one.
    rows = trained_rows(args.adapter, args.dtype)
    base = AutoModelForCausalLM.from_pretrained(base_name, revision=origin.revision, dtype=args.dtype)
    # PEFT's own loading grows it to the tokenizer's length, which is less than some adapters were trained with.
    base.resize_token_embeddings(rows, mean_resizing=False)
    model = PeftModel.from_pretrained(base, args.adapter).eval()
    generation_config = GenerationConfig.from_pretrained(args.adapter)
    mask = generation_config.mars_mask_token_id
    before = initial_row(base_name, args.adapter, args.dtype, args.seed)
    ids = torch.tensor([[*tokenizer(args.text)["input_ids"], *[mask] * (generation_config.mars_block_size - 1)]])
    expected = model(ids).logits

    merged = model.merge_and_unload()
    merged.generation_config = generation_config
    # With MARS generation it saves the decoding code and names the mask token in its config too.
    get_mars_model(merged).save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    row = merged.get_input_embeddings().weight[mask]
    logits = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=args.dtype).eval()(ids).logits
    difference = (logits - expected).abs().max() / expected.abs().max()
    moved = (row - before).norm() / before.norm()
    print(f"Mask token {tokenizer.mask_token} (id {mask}): moved by {moved:.2f} of its norm.")
    print(f"Logits of {ids.shape[1]} tokens: at most {difference:.1e} of the largest apart.")
    print(f"Merged into {args.output_dir}.")


if __name__ == "__main__":
    main()
