"""Llama 2 by size: --config=configs/llama2.py:7b (also 13b, 70b). Touvron et al. (2023), as published in config.json."""

from configs import common

SIZES = {
    #        hidden  feed-forward  layers  heads  kv heads
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "70b": (8192, 28672, 80, 64, 8),
}


def get_config(size="7b"):
    if size not in SIZES:
        raise ValueError(f"configs/llama2.py has no size {size!r}; sizes are {', '.join(SIZES)}")
    c = common.get_config()
    m = c.model
    m.vocab_size = 32000
    m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads = SIZES[size]
    m.head_dim = 128
    m.max_length = 4096
    m.rms_norm_eps = 1e-5
    m.rope_theta = 10000.0
    m.rope_type = "default"
    m.tie_embeddings = False
    m.dtype = "bfloat16"
    c.decode.slots = 32
    return c
