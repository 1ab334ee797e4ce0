"""Start-up self-test: numbered patterns over every engine pair and bucket, every value checked on the devices.

It is also the warm-up: it opens the connections (about 2 s the first time between two processes) and compiles the
transfer's programs. All processes run it in the same order.
"""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from disagg import chunk as chunks


def pattern(shape, number):
    """Values 0..126, exact in every cache dtype, from an element's global index and the number; [shape] of its dtype."""
    index = jnp.zeros(shape.shape, jnp.uint32)
    for axis, size in enumerate(shape.shape):
        index = index * size + jax.lax.broadcasted_iota(jnp.uint32, shape.shape, axis)
    mixed = (index + number * jnp.uint32(7919)) * jnp.uint32(2654435761)
    return ((mixed >> 16) % 127).astype(shape.dtype)


def wait(arrays, deadline_s, what):
    """Block until all arrays are there. Raises TimeoutError after deadline_s, RuntimeError if one failed."""
    end = time.monotonic() + deadline_s
    while not all(a.is_ready() for a in jax.tree.leaves(arrays)):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: nothing arrived within {deadline_s:.0f} s; are the transfer sockets' addresses "
                               "and ports open between the hosts?")
        time.sleep(0.0005)
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError as e:
        raise RuntimeError(f"{what} failed: {e}") from None


def run(topology, transfers, buckets, deadline_s, meanwhile):
    """Send and check; -> for every pair that this process receives from, (p, d) -> GB/s of the largest bucket.

    meanwhile(): called while the first transfers open their connections. Raises RuntimeError naming the pair if a value
    is wrong, TimeoutError if one does not arrive.
    """
    form = transfers.form
    fill, check = _programs(topology, form)
    numbers = itertools.count(1)

    def send(p, d, bucket):
        """Issue one numbered pattern; -> (number, its parts or None, when)."""
        number, chunk = next(numbers), None
        if topology.process in topology.prefill[p].processes:
            chunk = jax.block_until_ready(fill(np.uint32(number), bucket))
        started = time.monotonic()
        return number, transfers.issue(-number, p, d, bucket, chunk), started

    def receive(p, d, bucket, number, parts, started):
        """Wait for a pattern and compare it; -> GB/s, or None where it does not come here."""
        if parts is None:
            return None
        what = (f"self-test: transfer of {bucket} positions from {topology.prefill[p].name} to {topology.decode[d].name}")
        wait(parts, deadline_s, what)
        seconds = time.monotonic() - started
        joined = transfers.routes[p, d].join(parts)
        right = check(chunks.unsealed(joined), np.uint32(number), bucket)
        if wrong := [name for name, ok in right.items() if not ok.addressable_data(0)]:
            raise RuntimeError(f"{what} delivered wrong values in {', '.join(wrong)}")
        if wrong := transfers.wrong_sums(parts):
            raise RuntimeError(f"{what}: the values are right and their checksums differ: {wrong}")
        return form.bytes(bucket) / seconds / 1e9

    opened = {pair: send(*pair, buckets[0]) for pair in transfers.routes}
    meanwhile()
    for pair, sent in opened.items():
        receive(*pair, buckets[0], *sent)
    # Then one after the other, as when serving, the largest once more: by then it is compiled, and measured.
    return {pair: rate for pair in transfers.routes
            for rate in [[receive(*pair, b, *send(*pair, b)) for b in (*buckets, buckets[-1])][-1]] if rate}


def _programs(topology, form):
    """This process's programs: fill(number, bucket) -> chunk on its prefill mesh; check(chunk, number, bucket) -> bools."""
    pattern_of = lambda n, bucket: jax.tree.map(lambda s: pattern(s, n), chunks.unsealed(form.shape(bucket)))
    source = topology.my_prefill
    layout = chunks.shardings(source.mesh, form.shape(1)) if source else None

    def same(got, n, bucket):
        equal = jax.tree.map(lambda g, w: jnp.all(g == w), got, pattern_of(n, bucket))
        return {name: functools.reduce(jnp.logical_and, jax.tree.leaves(ok)) for name, ok in equal.items()}
    return (jax.jit(lambda n, bucket: form.sealed(pattern_of(n, bucket)), static_argnums=1, out_shardings=layout), jax.jit(same, static_argnums=2))
