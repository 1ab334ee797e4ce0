"""Start-up self-test: numbered patterns over every engine pair and bucket, every value checked on the devices.

It is also the warm-up: it opens the connections (about 2 s the first time between two processes) and compiles the
transfer's programs. All processes run it in the same order.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from disagg import prefill


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


def run(model, topology, transfers, buckets, deadline_s):
    """Send and check; -> for every pair that this process receives from, (p, d) -> GB/s of the largest bucket.

    Raises RuntimeError naming the pair if a value is wrong, TimeoutError if one does not arrive.
    """
    shapes = {b: prefill.chunk_shape(model, b) for b in buckets}
    fill, check = _programs(topology, shapes)
    rates, number = {}, 0
    for (p, d), route in transfers.routes.items():
        source, destination = topology.prefill[p], topology.decode[d]
        for bucket in (*buckets, buckets[-1]):  # the largest again, connected and compiled, for the rate
            number += 1
            what = f"self-test: transfer of {bucket} positions from {source.name} to {destination.name}"
            chunk = None
            if topology.process in source.processes:
                chunk = fill(np.uint32(number), bucket)
                wait(chunk, deadline_s, what)
            started = time.monotonic()
            received = transfers.issue(-number, p, d, bucket, chunk)
            if received is None:
                continue
            wait(received, deadline_s, what)
            seconds = time.monotonic() - started
            right = check(route.join(received), np.uint32(number), bucket)
            if wrong := [name for name, ok in right.items() if not ok.addressable_data(0)]:
                raise RuntimeError(f"{what} delivered wrong values in {', '.join(wrong)}")
            rates[p, d] = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes[bucket])) / seconds / 1e9
    return rates


def _programs(topology, shapes):
    """This process's programs: fill(number, bucket) -> chunk on its prefill mesh; check(chunk, number, bucket) -> bools."""
    pattern_of = lambda n, bucket: {name: pattern(s, n) for name, s in shapes[bucket].items()}
    same = lambda got, n, bucket: jax.tree.map(lambda g, w: jnp.all(g == w), got, pattern_of(n, bucket))
    source = topology.my_prefill
    layout = prefill.chunk_shardings(source.mesh) if source else None
    return (jax.jit(pattern_of, static_argnums=1, out_shardings=layout), jax.jit(same, static_argnums=2))
