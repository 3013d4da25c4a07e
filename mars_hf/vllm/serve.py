"""Serve a MARS checkpoint: vLLM's OpenAI server with the plug-in's flags set.

python -m mars_hf.vllm.serve MODEL [--mars-block-size 4] [flags of vLLM]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence

from .settings import PROPOSER, WORKER

# Flags of vLLM that the plug-in sets itself.
RESERVED = ("--worker-cls", "--speculative-config", "--speculative_config", "--worker_cls", "-sc")


def vllm_arguments(argv: Sequence[str]) -> list[str]:
    """The command line for vLLM's server.

    Args:
        argv: the model, a folder or a name on the Hub; `--mars-block-size`, by default what the checkpoint was trained
            with; and flags of vLLM.

    Raises:
        ValueError: for flags that the plug-in sets itself, or a block size below 2.
    """
    parser = argparse.ArgumentParser(prog="python -m mars_hf.vllm.serve", allow_abbrev=False)
    parser.add_argument("model", help="a MARS checkpoint: a folder, or a name on the Hub")
    parser.add_argument("--mars-block-size", type=int, help="tokens that a forward can give (default: as trained)")
    own, flags = parser.parse_known_args(argv)
    taken = [flag for flag in flags if flag.split("=")[0] in RESERVED]
    if taken:
        raise ValueError(f"{', '.join(taken)}: set by mars_hf.vllm.serve itself; leave it out.")
    block_size = trained_block_size(own.model, flags) if own.mars_block_size is None else own.mars_block_size
    if block_size < 2:
        raise ValueError(f"`--mars-block-size` must be at least 2, got {block_size}.")
    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 2 * (block_size - 1)}
    return ["--model", own.model, "--worker-cls", WORKER, "--speculative-config", json.dumps(speculative), *flags]


def trained_block_size(model: str, flags: Sequence[str] = ()) -> int:
    """What the generation config records that vLLM reads too, given its flags; 4 where there is none."""
    from transformers import GenerationConfig

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("revision", "hf-config-path", "generation-config"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default=None)
    parser.add_argument("--hf-token", "--hf_token", nargs="?", const=True)
    known, _ = parser.parse_known_args(list(flags))
    source, revision = known.hf_config_path or model, known.revision
    if known.generation_config not in (None, "auto", "vllm"):
        source, revision = known.generation_config, None
    try:
        config = GenerationConfig.from_pretrained(source, revision=revision, token=known.hf_token)
    except OSError:  # config.json alone can say which token is [MASK]; vLLM says what else may be wrong
        return 4
    return getattr(config, "mars_block_size", None) or 4


def main() -> None:
    """Run vLLM's server in this process."""
    sys.argv[1:] = vllm_arguments(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        # Prometheus looks for it when it is first imported, by vLLM.
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        from .plugin import register

        register()
        serve()


if __name__ == "__main__":
    main()
