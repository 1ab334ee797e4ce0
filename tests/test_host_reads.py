"""The guard that proves that no KV goes through host memory must itself be able to fail."""

import subprocess
import sys

import pytest

from tests import cluster

WAYS = ["np.asarray(x)", "np.array(x)", "jax.device_get(x)", "x.tolist()", "memoryview(np.asarray(x))", "x.copy_to_host_async()",
        "np.asarray(x.addressable_data(0))", "np.asarray(x.addressable_shards[0].data)", "jax.device_get({'a': [x]})"]
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from tests import host_reads
host_reads.forbid(64 * 1024)
small, large = jnp.zeros(16 * 1024, jnp.float32), jnp.zeros(16 * 1024 + 1, jnp.float32)
for way in {ways!r}:
    read = eval("lambda x: " + way)
    read(small)
    try:
        read(large)
    except AssertionError as e:
        assert "the host reads 65540 bytes" in str(e), e
    else:
        print("not seen:", way)
"""


@pytest.mark.e2e
def test_every_way_to_read_is_seen():
    """Reads of 64 KiB pass and larger ones raise, by every way in."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(ways=WAYS)], cwd=cluster.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
