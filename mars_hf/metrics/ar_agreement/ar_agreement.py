"""Agreement with autoregressive decoding as an `evaluate` metric; see the class."""

import datasets
import evaluate

from mars_hf.metrics import bootstrap_interval, prefix_agreement


class ArAgreement(evaluate.Metric):
    """How far token ids are those of autoregressive decoding of the same prompts, with bootstrap intervals.

    `exact` is the share of replies that are the same token for token. `prefix` is the share of the longer reply's
    tokens that stand before the first difference, averaged over the replies: one token that differs early counts more
    than one that differs late.

    Args of `compute`:
        predictions: token ids of each reply, without padding.
        references: token ids of the autoregressive replies, without padding.
        seed: of the bootstrap.
    Returns: `exact`, `exact_low`, `exact_high`, `prefix`, `prefix_low`, `prefix_high`, in [0, 1].
    """

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.List(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="predictions: list of lists of int; references: list of lists of int",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]], seed: int = 0) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        shares = {
            "exact": [float(own == other) for own, other in pairs],
            "prefix": [prefix_agreement(own, other) for own, other in pairs],
        }
        result: dict[str, float] = {}
        for name, values in shares.items():
            low, high = bootstrap_interval(values, seed=seed)
            result |= {name: sum(values) / len(values), f"{name}_low": low, f"{name}_high": high}
        return result
