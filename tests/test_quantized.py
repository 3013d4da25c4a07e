"""Quantised models: the cursor cache and the whole sequence recomputed give the same tokens, and MARS off is stock."""

from __future__ import annotations

import pytest
import torch
from decoding_models import MASK, left_pad, random_prompts, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from mars_hf import get_mars_model


def with_torchao(path):
    quantization = pytest.importorskip("torchao.quantization")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def with_bitsandbytes(path):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=config, device_map="cpu"
    ).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("load", [with_torchao, with_bitsandbytes])
def test_a_quantised_model_decodes_as_its_own_oracle(load, tmp_path):
    # Of a size that the kernels take.
    plain = tiny_model(hidden_size=128, intermediate_size=128, head_dim=32, eos_token_id=None)
    plain.save_pretrained(tmp_path)
    model = get_mars_model(load(tmp_path), mask_token_id=MASK, block_size=4)
    inputs = left_pad(random_prompts([6, 9, 4]))
    with torch.no_grad():
        assert not torch.equal(plain(**inputs).logits, model(**inputs).logits)
    kwargs = {"max_new_tokens": 20, "do_sample": False}
    stock = model.generate(**inputs, **kwargs)
    assert torch.equal(model.generate(**inputs, mars_threshold=1.0, **kwargs), stock)
    for tau in (1e-9, 0.2):
        outputs = [
            model.generate(**inputs, mars_threshold=tau, return_dict_in_generate=True, mars_cache=cache, **kwargs)
            for cache in ("cursor", "none")
        ]
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        assert torch.equal(outputs[0].accepted_lengths, outputs[1].accepted_lengths)
    lossless = model.generate(**inputs, mars_lossless=True, **kwargs)
    assert torch.equal(lossless, model.generate(**inputs, suppress_tokens=[MASK], **kwargs))
