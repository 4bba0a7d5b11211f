"""What a simulation comes to: figures for the report, curves for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaling import ScaleTargets
from deploy.bench.report import percentile
from deploy.simulate.simulation import RequestRecord, SimulationResult

NUM_CURVE_POINTS = 200
_USUAL = ScaleTargets()


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; seconds are virtual, shares are of prompt tokens."""

    num_requests: int
    num_refused: int
    """Requests that could never fit."""
    hit_share: float
    predicted_hit_share: float
    """What the router expected to be cached when it placed them."""
    host_hit_share: float
    """Of all prompt tokens, brought back from host memory."""
    forecast_error_p50_s: float
    """Between the time to first token that the router predicted and what it was, whichever was longer."""
    forecast_error_p90_s: float
    forecast_bias_s: float
    """Predicted less actual time to first token, mean."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    tpot_mean_s: float
    """Between two output tokens of a request, mean over requests."""
    tpot_p99_s: float
    request_p50_s: float
    request_p99_s: float
    output_tokens_per_s: float
    num_moves: int
    """Queues that requests left for another's."""
    num_preemptions: int
    num_steps: int
    most_tokens_over_mean: float
    """Uncached prompt tokens of the busiest replica, over the mean of all."""
    virtual_s: float
    slo_share: float
    """Requests with first token and tokens after it within the targets."""
    replica_hours: float
    """Replicas times hours, those that start or drain included."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Points to draw, [x, y] each."""

    ttft_cdf: list[tuple[float, float]]
    tpot_cdf: list[tuple[float, float]]
    hit_share: list[tuple[float, float]]
    """Over time of arrival."""
    queued_tokens: list[list[tuple[float, float]]]
    """Of each replica over time."""
    num_running: list[list[tuple[float, float]]]
    num_replicas: list[tuple[float, float]]
    """That take requests, over time."""


def summarize(result: SimulationResult, num_replicas: int, targets: ScaleTargets = _USUAL) -> Summary:
    """Boil a run down to figures; ``num_replicas`` are the places that there were."""
    served = _served(result)
    ttfts, tpots = [one.ttft_s for one in served], _tpots(served)
    errors = [one.predicted_ttft_s - one.ttft_s for one in served]
    lasted = [one.end_s - one.arrival_s for one in served]
    computed = [0] * num_replicas
    for one in served:
        computed[one.replica] += one.num_prompt_tokens - one.num_cached_tokens
    num_prompt = sum(one.num_prompt_tokens for one in served)
    num_output = sum(one.num_output_tokens for one in served)
    return Summary(
        num_requests=len(result.records),
        num_refused=len(result.records) - len(served),
        hit_share=_round(sum(one.num_cached_tokens for one in served) / max(1, num_prompt)),
        predicted_hit_share=_round(sum(one.num_predicted_hit_tokens for one in served) / max(1, num_prompt)),
        host_hit_share=_round(sum(one.num_host_cached_tokens for one in served) / max(1, num_prompt)),
        forecast_error_p50_s=_percentile([abs(error) for error in errors], 0.5),
        forecast_error_p90_s=_percentile([abs(error) for error in errors], 0.9),
        forecast_bias_s=_round(_mean(errors)),
        ttft_mean_s=_round(_mean(ttfts)),
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p90_s=_percentile(ttfts, 0.9),
        ttft_p99_s=_percentile(ttfts, 0.99),
        ttft_max_s=_percentile(ttfts, 1.0),
        tpot_mean_s=_round(_mean(tpots), 5),
        tpot_p99_s=_round(_percentile(tpots, 0.99), 5),
        request_p50_s=_percentile(lasted, 0.5),
        request_p99_s=_percentile(lasted, 0.99),
        output_tokens_per_s=_round(num_output / result.end_s if result.end_s else 0.0, 1),
        num_moves=sum(one.num_moves for one in result.records),
        num_preemptions=result.num_preemptions,
        num_steps=result.num_steps,
        most_tokens_over_mean=_round(max(computed) * num_replicas / max(1, sum(computed)), 3),
        virtual_s=_round(result.end_s, 1),
        slo_share=_round(
            sum(one.ttft_s <= targets.ttft_s and _tpot_s(one) <= targets.tpot_s for one in served)
            / max(1, len(result.records))
        ),
        replica_hours=_round(result.replica_s / 3600, 2),
    )


def curves(result: SimulationResult, num_replicas: int) -> Curves:
    """What the page draws."""
    served = _served(result)
    times = [sample.time_s for sample in result.samples]
    return Curves(
        ttft_cdf=_cdf([one.ttft_s for one in served]),
        tpot_cdf=_cdf(_tpots(served)),
        hit_share=_hits_over_time(served),
        queued_tokens=[
            list(
                zip(
                    times, (float(sample.num_queued_tokens[number]) for sample in result.samples), strict=True
                )
            )
            for number in range(num_replicas)
        ],
        num_running=[
            list(zip(times, (float(sample.num_running[number]) for sample in result.samples), strict=True))
            for number in range(num_replicas)
        ],
        num_replicas=[(sample.time_s, float(sample.num_replicas)) for sample in result.samples],
    )


def _served(result: SimulationResult) -> list[RequestRecord]:
    return [one for one in result.records if one.first_token_s is not None]


def _tpots(served: Sequence[RequestRecord]) -> list[float]:
    return [_tpot_s(one) for one in served if one.num_output_tokens > 1]


def _tpot_s(one: RequestRecord) -> float:
    """Between two output tokens, mean over the request; 0 if there was but one."""
    return (one.end_s - one.arrival_s - one.ttft_s) / max(1, one.num_output_tokens - 1)


def _hits_over_time(served: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """Cached share of the prompt tokens in each of 50 stretches of arrivals."""
    size = -(-len(served) // 50) or 1
    points = []
    for start in range(0, len(served), size):
        part = served[start : start + size]
        num_prompt = sum(one.num_prompt_tokens for one in part)
        points.append((part[0].arrival_s, sum(one.num_cached_tokens for one in part) / num_prompt))
    return points


def _cdf(values: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    return [
        (ordered[last * point // NUM_CURVE_POINTS], point / NUM_CURVE_POINTS)
        for point in range(NUM_CURVE_POINTS + 1)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentile(values: list[float], share: float) -> float:
    return _round(percentile(values, share)) if values else 0.0


def _round(value: float, digits: int = 4) -> float:
    return round(value, digits)
