"""The parts of the plug-in that need no vLLM: the plan of a request, its checks, the command line."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mars_hf.vllm import plugin, settings
from mars_hf.vllm.plan import Plan, cut_after_stop, useful_drafts
from mars_hf.vllm.serve import trained_block_size, vllm_arguments
from mars_hf.vllm.settings import PROPOSER, WORKER, MarsSettings, check_request, threshold_of


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
    return SimpleNamespace(extra_args=extra, **params)


def test_requests_that_work_pass():
    for extra in (None, {}, {"mars_threshold": 0.9}, {"mars_threshold": 1}, {"other": "x"}):
        check_request(request(extra))
    for threshold in (None, 0.9, 1.0):
        check_request(request({"mars_threshold": threshold}, repetition_penalty=1.2, bad_words=["x"]))


@pytest.mark.parametrize(
    "wrong",
    [
        request({"mars_threshold": 0}),
        request({"mars_threshold": 1.01}),
        request({"mars_threshold": "0.9"}),
        request({"mars_threshold": float("nan")}),
        request({"mars_thresholds": 0.9}),
        request({"mars-threshold": 0.9}),
        request(None, thinking_token_budget=5),
        request(None, thinking_token_budget=0),
    ],
)
def test_requests_that_do_not_work_are_refused(wrong):
    with pytest.raises(ValueError, match=r"mars|thinking_token_budget"):
        check_request(wrong)


def test_a_wrong_threshold_that_nobody_checked_hurts_nobody(caplog):
    settings._warn_of_threshold.cache_clear()
    for wrong in ("high", "0.9", 0, 1.5, -1, float("nan"), True, [0.9]):
        assert threshold_of(request({"mars_threshold": wrong})) is None
    assert len(caplog.records) == 1
    assert [threshold_of(request(extra)) for extra in (None, {}, {"mars_threshold": 1})] == [None, None, 1.0]


@pytest.fixture
def front_end(monkeypatch):
    """As much of vLLM as `register` takes; its `InputProcessor`."""

    class InputProcessor:
        vllm_config = engine()

        def _validate_params(self, params):
            return "validated"

    parts = {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.exceptions": {"VLLMValidationError": type("VLLMValidationError", (ValueError,), {})},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.input_processor": {"InputProcessor": InputProcessor},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return InputProcessor


def test_requests_are_checked_once_whoever_else_checks_them(front_end, monkeypatch):
    def wrap():
        validate, calls = front_end._validate_params, []

        @functools.wraps(validate)
        def theirs(self, params):
            calls.append(params)
            return validate(self, params)

        front_end._validate_params = theirs
        return calls

    checked = []
    monkeypatch.setattr(plugin, "check_request", lambda params: checked.append(params) or check_request(params))
    inner = wrap()
    plugin.register()
    outer = wrap()
    plugin.register()
    assert front_end()._validate_params(request({"mars_threshold": 0.9})) == "validated"
    assert len(checked) == len(inner) == len(outer) == 1
    with pytest.raises(ValueError, match="Unknown") as raised:
        front_end()._validate_params(request({"mars_treshold": 0.9}))
    assert type(raised.value).__name__ == "VLLMValidationError"


def test_another_vllm_starts_with_the_plug_in_installed(front_end, monkeypatch, caplog):
    validate = front_end._validate_params
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "vllm.exceptions", None)
        plugin.register()
    assert front_end._validate_params is validate
    del front_end._validate_params
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "vLLM 0.32" in caplog.text


def test_a_runner_without_what_is_replaced_is_refused():
    runner = SimpleNamespace(**dict.fromkeys(settings.REPLACED))
    settings.check_runner(runner)
    del runner._sample
    with pytest.raises(ValueError, match="no _sample, which"):
        settings.check_runner(runner)


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


def test_block_size_is_read_where_vllm_reads_the_mask_token(tmp_path, monkeypatch):
    for name, entries in {"model": {"mars_block_size": 5}, "other": {"mars_block_size": 7}, "null": {}}.items():
        (tmp_path / name).mkdir()
        text = json.dumps({"mars_block_size": None, **entries})
        (tmp_path / name / "generation_config.json").write_text(text)
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    assert trained_block_size("model", ["--port", "80", "--generation-config", "vllm"]) == 5
    assert trained_block_size("model", ["--hf-config-path=other"]) == 7
    assert trained_block_size("model", ["--generation_config", "other", "--hf-token"]) == 7
    assert trained_block_size("null") == trained_block_size("bare") == trained_block_size("no/such_model") == 4
    seen = []
    monkeypatch.setattr("transformers.GenerationConfig.from_pretrained", lambda *args, **kw: seen.append((args, kw)))
    vllm_arguments(["owner/name", "--port", "80", "--revision", "v2", "--hf-token", "secret"])
    assert seen == [(("owner/name",), {"revision": "v2", "token": "secret"})]
