"""Tokens per forward pass as an `evaluate` metric; see the class."""

import datasets
import evaluate

from mars_hf.metrics import bootstrap_interval


class TokensPerForward(evaluate.Metric):
    """New tokens of all replies over the forward passes that their rows took part in, with a bootstrap interval.

    A ratio of sums, so long replies weigh more than short ones: it is the figure that time goes by. 1 is
    autoregressive decoding.

    Args of `compute`:
        tokens: new tokens of each reply, up to and with the one that ends it.
        forwards: forward passes that each reply's row took part in.
        seed: of the bootstrap.
    Returns: `tokens_per_forward`, `low`, `high`.
    """

    def _info(self) -> evaluate.MetricInfo:
        count = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="tokens: list of int; forwards: list of int",
            features=datasets.Features({"tokens": count, "forwards": count}),
        )

    def _compute(self, tokens: list[int], forwards: list[int], seed: int = 0) -> dict[str, float]:
        if min(forwards, default=1) < 1:
            raise ValueError("A reply takes one forward pass at least; `forwards` holds a smaller number.")
        if min(tokens, default=0) < 0:
            raise ValueError("A reply has no fewer than 0 tokens; `tokens` holds a smaller number.")
        low, high = bootstrap_interval(tokens, forwards, seed=seed)
        return {"tokens_per_forward": sum(tokens) / sum(forwards), "low": low, "high": high}
