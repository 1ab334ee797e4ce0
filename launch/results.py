"""Figures of the benchmarks: printed as they come, and written as JSON."""

import statistics

from absl import flags

JSON = flags.DEFINE_string("json", None, "file for the results as JSON")


def record(name, params, unit, values, peer, peer_values, show=True):
    """One result, with the spread as printed (unless it is not to be shown): median (least to largest)."""
    shown = lambda values: f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
    value, peer_value, ratio = statistics.median(values), None, None
    line = " ".join([name, *(f"{k} {v}" for k, v in params.items())]) + f": {shown(values)} {unit}"
    if peer:
        peer_value = statistics.median(peer_values)
        ratio = value / peer_value if peer_value else None
        line += f"; {peer}: {shown(peer_values)}; ratio {'none' if ratio is None else f'{ratio:.3f}'}"
    if show:
        print(line, flush=True)
    return {"name": name, "params": params, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio}
