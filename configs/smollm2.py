"""SmolLM2 by size: --config=configs/smollm2.py:135m (also 360m, 1.7b). Allal et al. (2025), as published in config.json.

The Instruct models are of the same architecture: the same names serve them.
"""

from configs import common

# Slots and positions suit a CPU as well as a TPU: the cache, in bfloat16, is 1.4, 2.5 and 12 GiB. On TPU a head dim of 64
# takes 128 lanes of the cache, twice its size. 135m and 360m are for one chip of v5e, of whose 16 GB they take 0.3 + 2.8
# and 0.7 + 5.0 GiB (their 3 and 5 kv heads divide over no larger slice); 1.7b takes 0.4 + 3.0 GiB of each of 8 chips.
SIZES = {
    #        hidden  feed-forward  layers  heads  kv heads  RoPE's theta
    "135m": (576, 1536, 30, 9, 3, 100000.0),
    "360m": (960, 2560, 32, 15, 5, 100000.0),
    "1.7b": (2048, 8192, 24, 32, 32, 130000.0),
}


def get_config(size="135m"):
    if size not in SIZES:
        raise ValueError(f"configs/smollm2.py has no size {size!r}; sizes are {', '.join(SIZES)} (Instruct or not)")
    c = common.get_config()
    m = c.model
    m.vocab_size = 49152
    m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads, m.rope_theta = SIZES[size]
    m.head_dim = 64
    m.max_length = 8192
    m.rms_norm_eps = 1e-5
    m.rope_type = "default"
    m.tie_embeddings = True
    m.dtype = "bfloat16"
    c.decode.slots = 32
    c.reads = (192, 512)
    return c
