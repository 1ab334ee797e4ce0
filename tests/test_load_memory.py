"""Loading a checkpoint takes the memory of its own shards and little more: the memory of a real process, at its peak."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from disagg import weights
from models import llama, llama_weights

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 2**20
ARCHITECTURE = dict(vocab_size=16384, hidden_size=1024, intermediate_size=8192, num_layers=4, num_heads=16, num_kv_heads=8,
                    head_dim=64, max_length=64)
SCRATCH = 32 * MIB  # of the copies under way, and of Python

CHILD = """
import json, sys
import jax
import numpy as np
from jax.sharding import Mesh
from disagg import sharding
from disagg.weights import Checkpoint
from models import llama, llama_weights
from tests.peak_memory import Watch, anonymous

folder, architecture, dtype, devices, total = json.loads(sys.argv[1])
jax.config.update("jax_num_cpu_devices", total)
model = llama.Llama(llama.Config(**architecture, dtype=dtype))
mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
shardings = sharding.tree(mesh, model.params_shape(), model.params_axes())
shard = lambda s, layout: int(np.prod(layout.shard_shape(s.shape))) * s.dtype.itemsize
sizes = jax.tree.leaves(jax.tree.map(shard, model.params_shape(), shardings))
jax.block_until_ready(jax.device_put(np.ones(8), jax.devices()[0]))  # what a backend needs from the start
before = anonymous("self")
with Watch("self") as watch:
    params = Checkpoint(folder, llama_weights.tensors(False), model.params_shape(), model.config.num_layers).load(shardings)
    jax.block_until_ready(params)
after = anonymous("self")
with Watch("self") as another:
    doubled = jax.block_until_ready(jax.tree.map(lambda x: x + 0, params))
print(json.dumps({"own": sum(sizes) * devices, "largest": max(sizes), "after": after - before, "peak": watch.peak - before,
                  "another": another.peak - before}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 330 MB in bfloat16, in two files."""
    folder, model = tmp_path_factory.mktemp("checkpoint"), llama.Llama(llama.Config(**ARCHITECTURE))
    where, files = {}, [{}, {}]
    shapes = weights.tensor_shapes(llama_weights.tensors(False), model.params_shape(), model.config.num_layers)
    for i, (name, shape) in enumerate(shapes.items()):
        where[name] = f"model-{i % 2}.safetensors"
        files[i % 2][name] = np.full(shape, 0.5, ml_dtypes.bfloat16)
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("dtype, devices", [("bfloat16", 1), ("float32", 2)])
def test_the_peak_of_a_load(folder, dtype, devices):
    """Own shards and a small constant, conversions included: on CPU the buffer that is filled is the shard, in other cases
    it comes on top, one at a time. Files do not count.

    The measurement sees the parameters, and a second copy of them.
    """
    child = subprocess.run([sys.executable, "-c", CHILD, json.dumps([str(folder), ARCHITECTURE, dtype, devices, 2])], cwd=ROOT,
                           capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    f = json.loads(child.stdout.splitlines()[-1])
    print(f)
    assert 0.98 * f["own"] < f["after"] <= f["peak"] < f["own"] + SCRATCH < f["own"] + f["largest"]
    assert f["another"] > 1.9 * f["own"]
