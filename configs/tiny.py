"""The small trained model in tests/data/tiny: one prefill and one decode process on this machine's CPU."""

import pathlib

from configs import common

CHECKPOINT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny"


def get_config():
    c = common.get_config()
    c.checkpoint = str(CHECKPOINT)
    c.model.num_heads = 8
    c.model.num_kv_heads = 4
    c.model.head_dim = 16
    c.model.dtype = "float32"
    c.matmul_precision = "float32"
    c.cache_length = 256
    c.chunk = 64
    c.buckets = (16, 32, 64)
    c.reads = (128,)
    c.prefill.batch = 2
    c.decode.slots = 4
    c.decode.steps = 2            # each step of a call is compiled: two start sooner than four
    return c
