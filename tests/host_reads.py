"""Makes reads of large device arrays by the host raise, to prove that no KV cache goes through host memory.

JAX's transfer guard does not see np.asarray on CPU, so every way in is guarded here.
"""

import functools

import jax
import numpy as np
from jax._src import array


def forbid(limit):
    """From now on, turning a JAX array of more than `limit` bytes into a host array raises AssertionError."""
    def check(x):
        assert x.nbytes <= limit, f"the host reads {x.nbytes} bytes of a device array {x.shape} {x.dtype}; allowed are {limit}"

    def guarded(function):
        @functools.wraps(function)
        def call(x, *args, **kwargs):
            for leaf in jax.tree.leaves(x):
                if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                    check(leaf)
            return function(x, *args, **kwargs)
        return call

    for name in ("asarray", "array", "ascontiguousarray", "copy"):
        setattr(np, name, guarded(getattr(np, name)))
    jax.device_get = guarded(jax.device_get)
    value = array.ArrayImpl._value
    array.ArrayImpl._value = property(lambda self: (check(self), value.fget(self))[1])
    for name in ("__array__", "__dlpack__", "copy_to_host_async", "tolist"):
        if hasattr(array.ArrayImpl, name):
            setattr(array.ArrayImpl, name, guarded(getattr(array.ArrayImpl, name)))
