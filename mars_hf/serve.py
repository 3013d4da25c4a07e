"""`transformers serve` whose models have MARS generation.

python -m mars_hf.serve path/or/repo --mars-threshold 0.9 --port 8000

It is `transformers serve`, with its options and its OpenAI-style endpoints. A request sets what is its own in the
field `generation_config`, a JSON object in a string: `{"mars_threshold": 0.8}`, or any other `mars_*` argument of
`generate`. Without one, and without `--mars-threshold`, the model decodes one token at a time.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any

from torch import Tensor

try:
    import typer
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from transformers import GenerationConfig
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server, utils
    from transformers.cli.serving.utils import BaseHandler, GenerateManager, split_revision
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`mars_hf.serve` needs `{error.name}`. Install the library with its extra: `pip install -e '.[serve]'`."
    ) from error

from .generation import takes_stock_path
from .generation_refusals import position_limit, refuse_positions
from .modeling import AutoMarsModelForCausalLM
from .options import check_threshold, expand_threshold

# Fields in which a request says how long its answer may be.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")


class MarsModelManager(model_manager.ModelManager):
    """A `ModelManager` that loads language models with `AutoMarsModelForCausalLM`.

    Attributes:
        mars_threshold: of requests that set none; None for one token at a time.
    """

    mars_threshold: float | None = None

    def __init__(self, *args: Any, continuous_batching: bool = False, **kwargs: Any) -> None:
        if continuous_batching:
            raise ValueError(
                "Continuous batching has a decoding loop of its own, without MARS. Leave out `--continuous-batching`, "
                "or use `transformers serve`."
            )
        super().__init__(*args, continuous_batching=False, **kwargs)

    def _load_model(
        self,
        model_id_and_revision: str,
        tqdm_class: type | None = None,
        progress_callback: Callable[[dict[str, Any]], None] | None = None,
        gguf_file: str | None = None,
    ) -> Any:
        model_id, revision = split_revision(model_id_and_revision)
        given = {"revision": revision, "gguf_file": gguf_file, "quantization_config": self.get_quantization_config()}
        if progress_callback is not None:
            progress_callback({"status": "loading", "model": model_id_and_revision, "stage": "config"})
        model = AutoMarsModelForCausalLM.from_pretrained(
            model_id,
            attn_implementation=self.attn_implementation,
            dtype=self.dtype,
            device_map=self.device,
            trust_remote_code=self.trust_remote_code,
            tqdm_class=tqdm_class,
            **{name: value for name, value in given.items() if value is not None},
        )
        if self.mars_threshold is not None:
            model.generation_config.mars_threshold = self.mars_threshold
            # A model that cannot do it is refused now, not by every request.
            check_settings(model, GenerationConfig())
        return model


class MarsGenerateManager(GenerateManager):
    """A `GenerateManager` that refuses before the answer begins: a stream has sent its status by then."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any) -> Any:
        prepare_request(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
    ) -> Any:
        prepare_request(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, **kwargs)


def prepare_request(model: Any, inputs: Any, config: GenerationConfig) -> None:
    """Check what a request asks of `generate`, and fit the server's own limit of its length to the model's positions.

    Raises:
        ValueError: what `generate` would raise for these settings.
    """
    settings = check_settings(model, config)
    # Of the request, or else of the checkpoint.
    new_tokens = settings.max_new_tokens
    if takes_stock_path(settings._mars_options, None) or new_tokens is None:
        return
    language, prompt = model.config.get_text_config(), inputs["input_ids"].shape[-1]
    limit = position_limit(language)
    if getattr(config, "_is_length_open", False) and limit is not None:
        config.max_new_tokens = new_tokens = max(1, min(new_tokens, limit - prompt))
    refuse_positions(language, [prompt], new_tokens)


def check_settings(model: Any, config: GenerationConfig) -> GenerationConfig:
    """The settings of a call with this config, beside which the checkpoint's own count.

    Raises:
        ValueError: what `generate` would raise for them, for one prompt.
    """
    settings, _ = model._prepare_generation_config(config)
    mode = settings.get_generation_mode()
    model._validate_generation_mode(mode, settings, {})
    if not takes_stock_path(settings._mars_options, None):
        model._prepare_cache_for_generation(settings, {}, mode, 1, 0)
        if isinstance(threshold := settings._mars_options.threshold, Tensor):
            expand_threshold(threshold, settings.num_return_sequences, settings)
    return settings


def check_body(body: dict[str, Any]) -> None:
    """Refuse a `generation_config` that is no JSON object in a string.

    Raises:
        HTTPException: status 422.
    """
    if body.get("generation_config") is None:
        return
    try:
        entries = json.loads(body["generation_config"])
    except (TypeError, ValueError) as error:
        raise HTTPException(422, f"`generation_config` must be a JSON object in a string: {error}") from error
    if not isinstance(entries, dict):
        raise HTTPException(422, "`generation_config` must be a JSON object in a string.")


def _with_checked_bodies(build: Callable[..., Any]) -> Callable[..., Any]:
    def build_generation_config(self: BaseHandler, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        check_body(body)
        config = build(self, body, *args, **kwargs)
        config._is_length_open = all(body.get(name) is None for name in LENGTHS)
        return config

    return build_generation_config


def _with_answered_errors(build: Callable[..., FastAPI]) -> Callable[..., FastAPI]:
    """What MARS refuses is a fault of the request, which the server would take for its own."""

    def build_server(*args: Any, **kwargs: Any) -> FastAPI:
        app = build(*args, **kwargs)

        @app.exception_handler(ValueError)
        async def refuse(request: Request, error: ValueError) -> JSONResponse:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)

        return app

    return build_server


def serve(mars_threshold: float | None = None, **options: Any) -> None:
    """Serve until the process ends; `options` are those of `transformers.cli.serve.Serve`.

    Raises:
        ValueError: for a threshold outside (0, 1], for continuous batching, and for `compile`.
    """
    if mars_threshold is not None:
        check_threshold(mars_threshold, "probability")
    if options.get("compile"):
        raise ValueError(
            "`--compile` gives every request a static cache and a compiled forward, and MARS steps have no fixed "
            "shape. Leave it out, or use `transformers serve`."
        )
    MarsModelManager.mars_threshold = mars_threshold
    # `Serve` makes its parts itself, from these names.
    model_manager.ModelManager = MarsModelManager
    utils.GenerateManager = MarsGenerateManager
    server.build_server = _with_answered_errors(server.build_server)
    BaseHandler._build_generation_config = _with_checked_bodies(BaseHandler._build_generation_config)
    Serve(**options)


def main() -> None:
    """The command line of `transformers serve`, with `--mars-threshold`."""
    threshold = inspect.Parameter(
        "mars_threshold",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[float | None, typer.Option(help="MARS threshold of requests that set none, in (0, 1].")],
    )
    _, *options = inspect.signature(Serve.__init__).parameters.values()

    def command(**given: Any) -> None:
        serve(**given)

    command.__doc__ = __doc__
    command.__signature__ = inspect.Signature([*options, threshold])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*options, threshold)}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    app()


if __name__ == "__main__":
    main()
