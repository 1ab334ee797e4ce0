"""Llama 3, 3.1 and 3.2 by version and size: --config=configs/llama3.py:3.1-8b (also 3-8b, 3-70b, 3.1-70b, 3.2-1b, 3.2-3b).

"The Llama 3 Herd of Models" (2024), as published in config.json. The Instruct models are of the same architecture, and
Llama 3.3 70B is of that of 3.1-70b: the same names serve them.
"""

from configs import common

# Slots and positions are for 8 chips with tensor parallelism 8, weights and cache in bfloat16, a chip holding an eighth.
# On v5e (16 GB a chip): 8b 1.9 + 8.0 GiB, 3b 0.8 + 7.0 GiB, 1b 0.3 + 4.0 GiB (its head dim of 64 takes 128 lanes of the
# cache, twice its size); 70b on v5p (95 GB a chip): 16.4 + 20.0 GiB. For longer contexts raise cache_length, up to
# max_length, and lower decode.slots by as much: the cache is their product. The common chunk of 512 keeps v5e's matrix
# units full (that takes some 240 tokens); `reads` has one length more than the common one, for the longer cache.
SIZES = {
    #        hidden  feed-forward  layers  heads  kv heads  head dim  tied  slots  positions
    "3-8b": (4096, 14336, 32, 32, 8, 128, False, 64, 8192),
    "3-70b": (8192, 28672, 80, 64, 8, 128, False, 64, 8192),
    "3.1-8b": (4096, 14336, 32, 32, 8, 128, False, 64, 8192),
    "3.1-70b": (8192, 28672, 80, 64, 8, 128, False, 64, 8192),
    "3.2-1b": (2048, 8192, 16, 32, 8, 64, True, 64, 8192),
    "3.2-3b": (3072, 8192, 28, 24, 8, 128, True, 64, 8192),
}

# From 3.1 on RoPE's frequencies are scaled, by a factor of the version, from 8192 positions to 131072.
ROPE_FACTOR = {"3.1": 8.0, "3.2": 32.0}


def get_config(size="3.1-8b"):
    if size not in SIZES:
        raise ValueError(f"configs/llama3.py has no size {size!r}; sizes are {', '.join(SIZES)} (Instruct or not)")
    c = common.get_config()
    m = c.model
    m.vocab_size = 128256
    (m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim, m.tie_embeddings,
     c.decode.slots, c.cache_length) = SIZES[size]
    c.reads = (512, 2048)
    m.max_length = 8192
    m.rms_norm_eps = 1e-5
    m.rope_theta = 500000.0
    m.rope_type = "default"
    version = size.split("-")[0]
    if version in ROPE_FACTOR:
        m.max_length = 131072
        m.rope_type = "llama3"
        m.rope_factor = ROPE_FACTOR[version]
        m.rope_low_freq_factor = 1.0
        m.rope_high_freq_factor = 4.0
        m.rope_original_length = 8192
    m.dtype = "bfloat16"
    return c
