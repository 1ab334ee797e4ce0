"""Llama 2 by size: --config=configs/llama2.py:7b (also 13b, 70b). Touvron et al. (2023), as published in config.json.

The chat models are of the same architecture: the same names serve them.
"""

from configs import common

# Slots and positions are for 8 chips with tensor parallelism 8, weights and cache in bfloat16, a chip holding an eighth:
# 7b and 13b on v5e (16 GB a chip): 1.6 + 4.0 and 3.1 + 6.3 GiB; 70b on v5p (95 GB a chip): 16.1 + 20.0 GiB.
# A prompt fills the matrix units of v5e from some 240 tokens a call on, so the common chunk of 512 and its buckets serve.
SIZES = {
    #        hidden  feed-forward  layers  heads  kv heads  slots  positions
    "7b": (4096, 11008, 32, 32, 32, 32, 2048),
    "13b": (5120, 13824, 40, 40, 40, 32, 2048),
    "70b": (8192, 28672, 80, 64, 8, 128, 4096),
}


def get_config(size="7b"):
    if size not in SIZES:
        raise ValueError(f"configs/llama2.py has no size {size!r}; sizes are {', '.join(SIZES)} (chat or not)")
    c = common.get_config()
    m = c.model
    m.vocab_size = 32000
    (m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads,
     c.decode.slots, c.cache_length) = SIZES[size]
    m.head_dim = 128
    m.max_length = 4096
    m.rms_norm_eps = 1e-5
    m.rope_theta = 10000.0
    m.rope_type = "default"
    m.tie_embeddings = False
    m.dtype = "bfloat16"          # published in float16
    return c
