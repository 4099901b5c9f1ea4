"""GET /metrics: the engine's counters under names that follow vLLM's, in a registry of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wingbeat.engine.metrics import EngineMetrics

FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)

GAUGES = {
    "num_requests_running": ("num_running", "choices that run"),
    "num_requests_waiting": ("num_waiting", "choices that wait for a place"),
    "plan_depth": ("plan_depth", "draft depth of the newest step; 0: no speculation"),
    "plan_topk": ("plan_topk", "branching of the newest step's drafts"),
    "plan_rows": ("plan_rows", "rows of the newest step's target forward"),
    "predicted_tokens_per_second": ("predicted_tokens_per_s", "what the policy expects of its plan"),
    "achieved_tokens_per_second": ("achieved_tokens_per_s", "moving average of steps without prefill"),
    "kv_cache_pages": ("pages_total", "pages of the K/V pool"),
    "kv_cache_pages_held": ("pages_held", "pages that running choices hold"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "prompt tokens computed"),
    "generation_tokens": ("generation_tokens", "tokens generated"),
    "target_forwards": ("target_forwards", "target forwards that sampled"),
    "engine_steps": ("steps", "steps"),
    "preemptions": ("preemptions", "choices that gave up their pages"),
    "prefix_cache_queries": ("prefix_queried_tokens", "prompt tokens looked up"),
    "prefix_cache_hits": ("prefix_hit_tokens", "prompt tokens found"),
    "spec_decode_num_drafts": ("num_drafts", "verifications of drafts, per choice"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "draft tokens verified"),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "draft tokens accepted, bonus tokens excluded"),
    "spec_decode_num_probes": ("probes", "guesses made while off to keep acceptance estimates alive"),
}
PARTS = ("draft", "verify", "accept", "listen", "host")


class Latencies:
    """Latency histograms, fed by the bridge as results arrive (wingbeat.server.bridge.Observer)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"wingbeat:{name}", what, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "arrival to first token, per choice", SLOW)
        self._between = histogram("inter_token_latency_seconds", "time per token after the first, per step", FAST)
        self._whole = histogram("e2e_request_latency_seconds", "arrival to last token, per choice", SLOW)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        self._between.observe(seconds / num_tokens)

    def request_done(self, seconds: float) -> None:
        self._whole.observe(seconds)


class EngineCollector(Collector):
    """Families from one snapshot of the engine's metrics."""

    def __init__(self, metrics: EngineMetrics, model_name: str) -> None:
        self._metrics, self._labels = metrics, {"model_name": model_name}

    def collect(self) -> Iterable[Metric]:
        for name, (field, what) in GAUGES.items():
            yield self._gauge(name, what, getattr(self._metrics, field))
        for name, (field, what) in COUNTERS.items():
            yield self._counter(name, what, [({}, getattr(self._metrics, field))])
        yield from self._labelled()

    def _labelled(self) -> Iterator[Metric]:
        m = self._metrics
        finished = [({"finished_reason": reason}, count) for reason, count in m.finished.items()]
        yield self._counter("request_success", "choices by how they ended", finished, label="finished_reason")
        for name, counts in (("accepted", m.accepted_per_pos), ("draft", m.drafted_per_pos)):
            rows = [({"position": str(i)}, count) for i, count in enumerate(counts)]
            what = f"{name} tokens by position, from 0"
            yield self._counter(f"spec_decode_num_{name}_tokens_per_pos", what, rows, label="position")
        seconds = [({"part": part}, getattr(m, f"{part}_seconds")) for part in PARTS]
        yield self._counter("step_time_seconds", "time of steps by part", seconds, label="part")

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"wingbeat:{name}", what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(
        self, name: str, what: str, rows: Sequence[tuple[dict[str, str], float]], label: str | None = None
    ) -> Metric:
        extra = [label] if label is not None else []
        family = CounterMetricFamily(f"wingbeat:{name}", what, labels=[*self._labels, *extra])
        for labels, value in rows:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


def exposition(latencies: CollectorRegistry, metrics: EngineMetrics, model_name: str) -> bytes:
    """The text that Prometheus scrapes."""
    now = CollectorRegistry()
    now.register(EngineCollector(metrics, model_name))
    return generate_latest(now) + generate_latest(latencies)
