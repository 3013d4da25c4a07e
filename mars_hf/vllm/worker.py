"""The worker: vLLM's own for the platform, whose model runner samples through `MarsSampler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from .counters import MarsCounters
from .sampler import MarsSampler
from .settings import check_engine, check_runner

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


def without_generators(runner: Any) -> Callable[..., Any]:
    """The runner's bookkeeping, to which no request has a random generator.

    It winds the generators back of requests whose prompt is still being read, by what vLLM's own sampler would have
    drawn for them. `MarsSampler` draws nothing for them, and a generator on a CPU cannot be wound back at all.
    """
    keep_books = runner._bookkeeping_sync

    def bookkeeping_sync(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return keep_books(*args, **kwargs)
        finally:
            batch.generators = generators

    return bookkeeping_sync


class MarsWorker(PlatformWorker):
    """Overrides `init_device`, to put the sampler in, and `execute_model`, to learn which requests begin and end."""

    def init_device(self) -> None:
        check_engine(self.vllm_config)
        super().init_device()
        runner = self.model_runner
        check_runner(runner)
        self.mars_counters = MarsCounters(publish=self.rank == 0)
        self.mars_sampler = MarsSampler(runner, runner.drafter.settings, self.mars_counters)
        runner.drafter.sampler = self.mars_sampler
        runner._sample = self.mars_sampler.sample
        runner._bookkeeping_sync = without_generators(runner)
        # Near the longest text vLLM asks no proposer, for fear of what its model cannot read. This one has no model,
        # and the scheduler cuts its drafts to what fits.
        runner._input_fits_in_drafter = lambda metadata: metadata is not None

    def execute_model(self, scheduler_output: Any) -> Any:
        self.mars_sampler.drop_drafts(new.req_id for new in scheduler_output.scheduled_new_reqs)
        output = super().execute_model(scheduler_output)
        self.mars_sampler.forget(scheduler_output.finished_req_ids)
        return output

    def mars_counts(self) -> dict[str, Any]:
        """The counts so far, for `LLM.collective_rpc("mars_counts")`; see `MarsCounters.snapshot`."""
        return self.mars_counters.snapshot()
