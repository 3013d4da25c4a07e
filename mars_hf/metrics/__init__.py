"""Metrics for `evaluate.load(path)`, and the bootstrap interval that all of them report."""

from .agreement import prefix_agreement
from .bootstrap import bootstrap_interval
from .gsm8k import gsm8k_match
from .paths import metric_path

__all__ = ["bootstrap_interval", "gsm8k_match", "metric_path", "prefix_agreement"]
