"""The `evaluate` modules, loaded by path and without network, and the bootstrap."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest

import mars_hf
from mars_hf.metrics import bootstrap_interval, metric_path

NAMES = ("ar_agreement", "gsm8k_exact_match", "tokens_per_forward")


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """`evaluate` copies the modules that it loads and imports the copies; not in the user's home, nor from there."""
    modules = tmp_path_factory.getbasetemp() / "modules"
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(modules)
    for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path_factory.getbasetemp() / "metrics"))


@pytest.mark.parametrize("name", NAMES)
def test_modules_load_by_path(name: str):
    module = evaluate.load(metric_path(name))
    assert isinstance(module, evaluate.Metric)
    assert module.description


def test_modules_load_by_folder():
    folder = Path(mars_hf.__file__).parent / "metrics" / "tokens_per_forward"
    assert evaluate.load(str(folder)).compute(tokens=[4], forwards=[2])["tokens_per_forward"] == 2


def test_unknown_metric():
    with pytest.raises(ValueError, match="Take one of ar_agreement, gsm8k_exact_match, tokens_per_forward"):
        metric_path("bleu")


def test_modules_are_listed():
    folder = Path(mars_hf.__file__).parent / "metrics"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__") == [*NAMES]


GSM8K = [
    # reply, reference, strict, flexible
    ("So 6 * 7 = 42.\n#### 42", "#### 42", True, True),
    ("It is 42.", "worked\n#### 42", False, True),
    ("#### 42\nBut then 7.", "#### 42", True, False),
    ("#### 1,234", "#### 1234", True, True),
    ("#### $5.00", "#### 5", True, True),
    ("#### -3", "#### 3", False, False),
    ("the answer is -3.", "#### -3", False, True),
    ("#### 0.5", "#### .5", True, True),
    ("no number at all", "#### 7", False, False),
    ("####", "#### 7", False, False),
    ("#### 42.", "#### 42", True, True),
    ("#### 421", "#### 42", False, False),
    ("", "#### 0", False, False),
]


@pytest.mark.parametrize(("reply", "reference", "strict", "flexible"), GSM8K)
def test_gsm8k_reads_numbers(reply: str, reference: str, strict: bool, flexible: bool):
    result = evaluate.load(metric_path("gsm8k_exact_match")).compute(predictions=[reply], references=[reference])
    assert (result["strict"], result["flexible"]) == (strict, flexible)


def test_gsm8k_averages_and_brackets():
    replies, references = [case[0] for case in GSM8K], [case[1] for case in GSM8K]
    result = evaluate.load(metric_path("gsm8k_exact_match")).compute(
        predictions=replies, references=references, seed=3
    )
    assert result["strict"] == sum(case[2] for case in GSM8K) / len(GSM8K)
    assert result["flexible"] == sum(case[3] for case in GSM8K) / len(GSM8K)
    assert 0 < result["strict_low"] < result["strict"] < result["strict_high"] < 1


def test_gsm8k_needs_marked_references():
    with pytest.raises(ValueError, match="The reference has no"):
        evaluate.load(metric_path("gsm8k_exact_match")).compute(predictions=["1", "2"], references=["#### 1", "2"])


def test_tokens_per_forward_is_a_ratio_of_sums():
    metric = evaluate.load(metric_path("tokens_per_forward"))
    result = metric.compute(tokens=[90, 10], forwards=[30, 10])
    assert result["tokens_per_forward"] == 2.5
    assert (result["low"], result["high"]) == (1.0, 3.0)
    with pytest.raises(ValueError, match="one forward pass at least"):
        metric.compute(tokens=[1], forwards=[0])
    with pytest.raises(ValueError, match="no fewer than 0 tokens"):
        metric.compute(tokens=[-1], forwards=[1])


@pytest.mark.parametrize("name", ["gsm8k_exact_match", "tokens_per_forward", "ar_agreement"])
def test_no_reply_is_said_to_be_none(name: str):
    columns = ("tokens", "forwards") if name == "tokens_per_forward" else ("predictions", "references")
    with pytest.raises(ValueError, match="one value and one weight per example"):
        evaluate.load(metric_path(name)).compute(**{column: [] for column in columns})


def test_ar_agreement():
    metric = evaluate.load(metric_path("ar_agreement"))
    result = metric.compute(predictions=[[1, 2, 3, 4], [1, 9], [5, 6], []], references=[[1, 2, 3, 4], [1, 2], [5], []])
    assert result["exact"] == 0.5
    assert result["prefix"] == (1 + 0.5 + 0.5 + 1) / 4


def test_bootstrap_is_seeded_and_narrows():
    rng = np.random.default_rng(1)
    few, many = rng.random(40), rng.random(4000)
    assert bootstrap_interval(few, seed=1) == bootstrap_interval(few, seed=1)
    assert bootstrap_interval(few, seed=1) != bootstrap_interval(few, seed=2)
    assert np.ptp(bootstrap_interval(many)) < np.ptp(bootstrap_interval(few)) / 5
    # The normal interval of a mean is the oracle.
    half = 1.96 * few.std() / len(few) ** 0.5
    assert bootstrap_interval(few) == pytest.approx((few.mean() - half, few.mean() + half), abs=half / 5)


def test_bootstrap_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = rng.random((200, 60)) < 0.7
    inside = [low <= 0.7 <= high for low, high in (bootstrap_interval(row, resamples=300) for row in draws)]
    assert 0.88 <= np.mean(inside) <= 0.99


def test_groups_widen_the_interval_where_seeds_differ():
    values, groups = [1.0] * 50 + [0.0] * 50, [0] * 50 + [1] * 50
    assert bootstrap_interval(values, groups=groups) == (0.0, 1.0)
    alike = ([1.0, 0.0] * 50, [0] * 50 + [1] * 50)
    assert bootstrap_interval(alike[0], groups=alike[1])[0] > 0.3


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("one value and one weight", ([],), {}),
        ("one value and one weight", ([1.0], [1.0, 2.0]), {}),
        ("level", ([1.0],), {"level": 1.0}),
        ("one group", ([1.0],), {"groups": [0, 1]}),
    ],
)
def test_bootstrap_refuses(message: str, arguments: tuple, options: dict):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(*arguments, **options)


def test_package_ships_the_modules():
    setup = (Path(__file__).parents[1] / "setup.cfg").read_text()
    assert "metrics/*/*.py" in setup
    for name in NAMES:
        ast.parse(Path(metric_path(name)).read_text())
