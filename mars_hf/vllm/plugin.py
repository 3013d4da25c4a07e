"""vLLM's entry point `vllm.general_plugins`: requests are checked where they come in, so that a wrong one is answered
with an error and does not reach the engine."""

from __future__ import annotations

from functools import wraps
from typing import Any

from .settings import check_request, is_mars


def register() -> None:
    """Check the `mars_*` entries of requests to engines that run this plug-in; vLLM calls it in all its processes."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    validate = InputProcessor._validate_params
    if hasattr(validate, "__wrapped__"):
        return

    @wraps(validate)
    def validate_with_mars(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        result = validate(self, params, *args, **kwargs)
        if isinstance(params, SamplingParams) and is_mars(self.vllm_config):
            try:
                check_request(params)
            except ValueError as error:
                # The kind of ValueError that the server answers with status 400.
                raise VLLMValidationError(str(error)) from error
        return result

    InputProcessor._validate_params = validate_with_mars
