"""vLLM's entry point `vllm.general_plugins`: requests are checked where they come in, so that a wrong one is answered
with an error and does not reach the engine."""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from .settings import check_request, is_mars

logger = logging.getLogger(__name__)
# What our check carries, and `functools.wraps` hands on to checks that others put around it.
MARK = "checks_mars"


def register() -> None:
    """Check the `mars_*` entries of requests to engines that run this plug-in; vLLM calls it in all its processes.

    A vLLM that is built otherwise is left as it is: this is called for engines that have nothing to do with MARS too.
    """
    try:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.input_processor import InputProcessor

        validate = InputProcessor._validate_params
    except (ImportError, AttributeError) as error:
        logger.warning("mars_hf was written for vLLM 0.32 and does not check the requests of this one: %s", error)
        return
    if hasattr(validate, MARK):
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

    setattr(validate_with_mars, MARK, True)
    InputProcessor._validate_params = validate_with_mars
