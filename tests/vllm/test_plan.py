"""The parts of the plug-in that need no vLLM: the plan of a request, its checks, the command line."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from mars_hf.vllm.plan import Plan, cut_after_stop, useful_drafts
from mars_hf.vllm.serve import vllm_arguments
from mars_hf.vllm.settings import PROPOSER, WORKER, MarsSettings, check_request


def test_certain_drafts_stand_at_their_places():
    plan = Plan(position=10, drafts=[5, 6, 7], certain=True)
    assert plan.forced(10, 5) == [5, 6, 7, None, None]
    assert plan.forced(8, 4) == [None, None, 5, 6]
    assert plan.forced(12, 2) == [7, None]
    assert Plan(position=10, drafts=[5, 6, 7]).forced(10, 2) == [None, None]


def test_certain_drafts_outlive_a_step_that_was_cut_short():
    plan = Plan(position=10, drafts=[5, 6, 7], certain=True)
    assert plan.left_behind(11, last=5) == [6, 7]
    assert plan.left_behind(13, last=7) == []
    # A grammar has put another token in the place of the first draft.
    assert plan.left_behind(11, last=9) == []


@pytest.mark.parametrize(("remaining", "drafts", "masks"), [(9, 3, 3), (6, 3, 2), (4, 3, 0), (2, 1, 0), (1, 0, 0)])
def test_no_more_is_fed_than_may_come_of_it(remaining, drafts, masks):
    plan = Plan()
    plan.feed(20, [1, 2, 3], certain=False, masks=3, remaining=remaining)
    assert (plan.fed, plan.masks) == (drafts, masks)


def test_runs_end_with_their_first_stop():
    assert cut_after_stop([1, 2, 3, 2], frozenset({2})) == [1, 2]
    assert cut_after_stop([1, 3], frozenset({2})) == [1, 3]


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 2.5])
def test_useful_drafts_have_the_largest_yield(value):
    for confidences in itertools.product((0.1, 0.5, 0.9, 1.0), repeat=3):
        best = useful_drafts(confidences, value)
        yields = []
        for count in range(4):
            right, total = 1.0, 0.0
            for confidence in confidences[:count]:
                right *= confidence
                total += right
            yields.append(total + right * value)
        assert yields[best] == max(yields)


def request(extra=None, **params):
    defaults = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "bad_words": None}
    return SimpleNamespace(extra_args=extra, **{**defaults, **params})


def test_requests_that_work_pass():
    for extra in (None, {}, {"mars_threshold": 0.9}, {"mars_threshold": 1}, {"other": "x"}):
        check_request(request(extra))
    check_request(request(None, repetition_penalty=1.2))
    check_request(request({"mars_threshold": 1.0}, repetition_penalty=1.2))


@pytest.mark.parametrize(
    "wrong",
    [
        request({"mars_threshold": 0}),
        request({"mars_threshold": 1.01}),
        request({"mars_threshold": "0.9"}),
        request({"mars_threshold": float("nan")}),
        request({"mars_thresholds": 0.9}),
        request({"mars_threshold": 0.9}, bad_words=["x"]),
        request({"mars_threshold": 0.9}, presence_penalty=-0.5),
        request(None, thinking_token_budget=5),
    ],
)
def test_requests_that_do_not_work_are_refused(wrong):
    with pytest.raises(ValueError, match=r"mars_|thinking_token_budget"):
        check_request(wrong)


def engine(**changes):
    """A `VllmConfig` as far as the plug-in reads it."""
    values = {"method": "custom_class", "model": PROPOSER, "count": 6, "stages": 1, "v2": False, "mask": 7, **changes}
    speculative = SimpleNamespace(
        method=values["method"], model=values["model"], num_speculative_tokens=values["count"]
    )
    model = SimpleNamespace(
        model="m",
        hf_text_config=SimpleNamespace(),
        try_get_generation_config=lambda: {"mars_mask_token_id": values["mask"]},
    )
    parallel = SimpleNamespace(pipeline_parallel_size=values["stages"])
    return SimpleNamespace(
        speculative_config=speculative, model_config=model, parallel_config=parallel, use_v2_model_runner=values["v2"]
    )


def test_engine_settings():
    assert MarsSettings.from_vllm(engine()) == MarsSettings(mask_token_id=7, draft_length=3)


@pytest.mark.parametrize("changes", [{"method": "ngram"}, {"count": 5}, {"stages": 2}, {"v2": True}, {"mask": None}])
def test_engines_that_do_not_work_are_refused(changes):
    with pytest.raises(ValueError, match=r"proposer|even|pipeline|V1|MASK"):
        MarsSettings.from_vllm(engine(**changes))


def test_command_line():
    arguments = vllm_arguments(["some/model", "--mars-block-size", "3", "--port", "80"])
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert flags["--model"] == "some/model"
    assert flags["--worker-cls"] == WORKER
    assert flags["--port"] == "80"
    assert json.loads(flags["--speculative-config"]) == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 4,
    }
    for wrong in (["m", "--mars-block-size", "1"], ["m", "--mars-block-size", "4", "--worker-cls=x"]):
        with pytest.raises(ValueError, match=r"at least 2|set by"):
            vllm_arguments(wrong)
