"""What Prometheus may know: the engine's counters as they are, and times of finished requests.

Names are those of vLLM with our prefix, so that dashboards fit. The registry belongs to one
application.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sapwood.runtime.outputs import RequestMetrics
from sapwood.server.engine import ServingEngine

# Seconds; each about twice the one before.
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class EngineCollector(Collector):
    """Reads the engine's statistics when it is scraped. Nothing while there is no engine."""

    def __init__(self, engine: Callable[[], ServingEngine | None]) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        if engine is None:
            return
        stats, model = engine.stats(), engine.info.model_name
        constraints = engine.constraint_stats()
        counters = {
            "prompt_tokens": ("Prompt tokens of admitted requests.", stats.prompt_tokens),
            "cached_tokens": ("Prompt tokens that were not computed.", stats.cached_tokens),
            "computed_tokens": ("Rows of all forward passes.", stats.computed_tokens),
            "generation_tokens": ("Generated tokens.", stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found.", stats.cached_tokens),
            "num_preemptions": ("Preemptions.", stats.num_preemptions),
            "warm_prefix_hits": ("Requests that came back to a warm prefix.", stats.num_taken_up),
            "num_quarantines": ("Times the cache was dropped in doubt.", stats.num_quarantines),
            "steps": ("Forward passes.", stats.num_steps),
            "constraint_cache_hits": ("Requests: compiled before.", constraints.num_hits),
            "constraint_refusals": ("Requests: constraint refused.", constraints.num_refusals),
            "constraint_failures": ("Requests: backend failed.", constraints.num_failures),
            "constraint_turned_away": ("Requests: too many wait.", constraints.num_turned_away),
            "constraint_compiles": ("Constraints compiled.", constraints.num_compiles),
            "constraint_overruns": ("Constraints past their deadline.", constraints.num_overruns),
            "constraint_compile_seconds": ("Time in compiles.", constraints.compile_seconds),
        }
        for name, (text, value) in counters.items():
            yield _labelled(CounterMetricFamily, name, text, model, value)
        gauges = {
            "num_requests_running": ("Requests in the batch.", stats.num_running),
            "num_requests_waiting": ("Requests that wait.", stats.num_waiting),
            "kv_cache_usage_perc": ("KV cache in use by requests, 0 to 1.", stats.kv_usage),
            "kv_cache_tree_blocks": ("Blocks that the tree holds.", stats.num_tree_blocks),
            "kv_cache_warm_blocks": ("Blocks kept for what follows.", stats.num_warm_blocks),
            "kv_cache_free_blocks": ("Blocks that nobody holds.", stats.num_free_blocks),
            "num_constraints_waiting": ("Constraints to compile.", constraints.num_waiting),
            "constraint_cache_entries": ("Compiled constraints kept.", constraints.num_grammars),
            "constraint_cache_bytes": ("Memory that these take.", constraints.grammar_bytes),
        }
        for name, (text, number) in gauges.items():
            yield _labelled(GaugeMetricFamily, name, text, model, number)
        finished = CounterMetricFamily(
            "sapwood:request_success",
            "Finished requests by reason.",
            labels=("model_name", "finished_reason"),
        )
        for reason, count in sorted(stats.num_finished_by_reason.items()):
            finished.add_metric((model, reason), count)
        yield finished


def _labelled(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    model: str,
    value: float,
) -> Metric:
    metric = family(f"sapwood:{name}", text, labels=("model_name",))
    metric.add_metric((model,), value)
    return metric


class ServerMetrics:
    """The registry of one application and the histograms in it."""

    def __init__(self, engine: Callable[[], ServingEngine | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", REQUEST_BUCKETS
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds",
            "Mean time between the tokens of one request, from the second token on.",
            TOKEN_BUCKETS,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step.", REQUEST_BUCKETS
        )

    def observe(self, times: RequestMetrics, *, model: str, num_tokens: int) -> None:
        """Count a finished request that generated `num_tokens` in all."""
        arrived, first, finished = times.arrival_time, times.first_token_time, times.finished_time
        if times.first_scheduled_time is not None:
            self._queued.labels(model).observe(times.first_scheduled_time - arrived)
        if first is not None:
            self._first_token.labels(model).observe(first - arrived)
        if finished is not None:
            self._whole.labels(model).observe(finished - arrived)
            if first is not None and num_tokens > 1:
                self._between_tokens.labels(model).observe((finished - first) / (num_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"sapwood:{name}", text, ("model_name",), registry=self.registry, buckets=buckets
        )
