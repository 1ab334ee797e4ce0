"""What a batch has done and how long it took, as a table: its own requests' times, all of them, and the engines' from the metrics."""

import collections

from disagg.metrics import STAGES

PERCENTILES = 50, 90, 99


def percentile(values, q):
    """The least value that at least q percent do not exceed."""
    return sorted(values)[max(0, -(-len(values) * q // 100) - 1)]


def table(ends, lives, metrics, seconds, new_tokens):
    """ends: how each request has ended. lives: the metrics.Life of those that were submitted. metrics: the leader's, whose other
    figures are of the whole cell. seconds: of the batch. new_tokens: of its answers. -> lines of text."""
    rows = [("requests", f"{len(ends):,} in {seconds:.1f} s: " + (", ".join(f"{n:,} {how}" for how, n in collections.Counter(ends).most_common())
                                                                  or "none"))]
    made = sum(life.tokens for life in lives)
    rows.append(("tokens", f"{sum(life.prompt for life in lives if life.begun is not None):,} of prompts, {new_tokens:,} new"
                 + (f" and {made - new_tokens:,} after a stop string or before an error" if made > new_tokens else "")
                 + f", {new_tokens / seconds:,.1f} new ones/s"))
    heads = "".join(f"{f'p{q}':>14}" for q in PERCENTILES)
    times = {"first token": [life.ttft for life in lives if life.first is not None],
             "between tokens": [gap for life in lives for gap in life.gaps],
             "a token": [life.tpot for life in lives if life.tokens > 1],
             "whole request": [(life.last if life.ended is None else life.ended) - life.submitted for life in lives if life.first is not None]}
    if times["first token"]:
        rows.append(("", heads))
    for name, values in times.items():
        if values:
            rows.append((name, "".join(f"{1e3 * percentile(values, q):>11,.1f} ms" for q in PERCENTILES)))
    stages = {stage: [s for life in lives if (s := life.stages()[stage]) is not None] for stage in STAGES}
    if any(stages.values()):
        rows.append(("stages, p50", ", ".join(f"{stage} {1e3 * percentile(values, 50):,.1f} ms" for stage, values in stages.items() if values)))
    rows.append(("moved", f"{metrics.value('disagg_moved_bytes_total'):,.0f} bytes"))
    busy = metrics.values("disagg_decode_busy_seconds_total", "engine")
    for d, idle in metrics.values("disagg_decode_idle_seconds_total", "engine").items():
        if busy[d]:
            rows.append((f"decode {d}", f"device idle {100 * idle / (idle + busy[d]):.1f}% of {idle + busy[d]:.1f} s with active slots"))
    lag = ", ".join(f"process {process} {plans:,.0f}" for process, plans in metrics.values("disagg_plan_lag_max", "process").items())
    rows.append(("plans", f"{metrics.value('disagg_plans_total'):,.0f}" + (f"; behind at most: {lag}" if lag else "")))
    return "\n".join(f"{name:<15} {text}" for name, text in rows)
