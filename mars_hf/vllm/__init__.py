"""MARS inside vLLM: a plug-in that serves a MARS checkpoint with several tokens per forward.

It runs in vLLM's own environment, whose transformers is older than the one the rest of this library needs, so nothing
here imports more of the library than torch alone can load, and nothing else in the library imports this.

    python -m mars_hf.vllm.serve MODEL
"""
