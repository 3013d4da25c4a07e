"""GSM8K exact match as an `evaluate` metric; see the class."""

import datasets
import evaluate

from mars_hf.metrics import bootstrap_interval, gsm8k_match


class Gsm8kExactMatch(evaluate.Metric):
    """Share of replies whose final number is that of the reference, with bootstrap intervals.

    `strict` takes the number behind the first `####` of a reply and counts a reply without one as wrong; `flexible`
    takes the reply's last number. References end in `#### number`, as those of GSM8K do. Commas, a dollar sign and
    zeros behind a decimal point do not matter.

    Args of `compute`:
        predictions: replies, as text.
        references: worked answers, as text.
        seed: of the bootstrap.
    Returns: `strict`, `strict_low`, `strict_high`, `flexible`, `flexible_low`, `flexible_high`, in [0, 1].
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Cobbe et al. 2021, Training Verifiers to Solve Math Word Problems, arXiv 2110.14168",
            inputs_description="predictions: list of str; references: list of str",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str], seed: int = 0) -> dict[str, float]:
        right = [gsm8k_match(*pair) for pair in zip(predictions, references, strict=True)]
        result: dict[str, float] = {}
        for place, name in enumerate(("strict", "flexible")):
            values = [pair[place] for pair in right]
            low, high = bootstrap_interval(values, seed=seed)
            result |= {name: sum(values) / len(values), f"{name}_low": low, f"{name}_high": high}
        return result
