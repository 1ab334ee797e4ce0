"""Llama for inference in Flax NNX: layers scanned or one after the other, an explicit KV cache in and out.

Axes, the same letters everywhere:
  B batch (slots)   S new tokens of a sequence   T cache length   V vocabulary   E embedding (hidden size)
  L layers          N query heads   K kv heads   G = N / K        D head dim     F feed-forward size
  R new tokens whose queries a device computes: S, or its part of them where the attention is split by rows

Weights are stored [out, in], as Hugging Face stores them: with the projections to queries, keys and values the other way
round XLA transposes them in every decode step. What is multiplied with the same input is one array. The cache is read layer by layer and never written meanwhile; `forward` returns the new
positions' keys and values, and the caller scatters them into the (donated) cache once, after the layers. That is the
formulation in which a decode step reads weights and cache once and copies nothing.

Architecture: Touvron et al., "Llama 2" (2023); grouped-query attention: Ainslie et al. (2023); RoPE: Su et al. (2021).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

MASKED = -1e30  # finite, so that a row without any visible position gives zeros and not NaN


@dataclasses.dataclass(frozen=True)
class Config:
    """Architecture of one Llama; frozen and built by keyword, so that a misspelt field is an error.

    `dtype` is the dtype of weights, activations and cache; norms, softmax and logits are computed in float32.
    `kv_cache_dtype` "int8" quantises the cache that is decoded from: see `quantize`.
    `query_rows`: the query rows of one kv head are padded to this many before the attention products (8 on TPU keeps
    multi-head models on the matrix unit; 1 pads nothing).
    `rope_type` is "default" or "llama3" (frequencies scaled as in the published Llama 3.1 model code; the three
    rope_* factors and `rope_original_length` belong to it).
    `scan_layers`: the layers' weights are stacked and scanned, which XLA for TPU and GPU reads in place, or arrays of
    their own in an unrolled loop: XLA for CPU copies every layer out of a stack before it uses it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    tie_embeddings: bool = False
    dtype: str = "float32"
    kv_cache_dtype: str = ""
    query_rows: int = 1
    scan_layers: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"model.{field.name} must be positive, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads "
                             f"({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even for RoPE, got {self.head_dim}")
        if self.rope_type not in ("default", "llama3"):
            raise ValueError(f"model.rope_type must be 'default' or 'llama3', got {self.rope_type!r}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"model.dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
        if self.kv_cache_dtype not in ("", "int8"):
            raise ValueError(f"kv_cache_dtype must be '' (that of the model) or 'int8', got {self.kv_cache_dtype!r}")


class KV(NamedTuple):
    """Keys and values, each [layers, batch, kv_heads, length, head_dim] in the model's dtype, or int8 with a float32 scale
    for each position and head, [layers, batch, kv_heads, length]."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


_SCALE = ("layers", "batch", "kv_heads", "length")
KV_AXES = KV(*[(*_SCALE, "head_dim")] * 2, *[_SCALE] * 2)

# The arguments and results of `attend`. "rows": the new tokens that ask; "new": those that are attended to; "columns": N*D.
_ROTATION = ("batch", "new", None, None)
_HEADS = ("batch", "kv_heads", "new", "head_dim")
ATTEND_AXES = (("batch", "rows", "kv_heads", None, "head_dim"), *[("batch", "new", "kv_heads", "head_dim")] * 2,
               *[KV_AXES.k[1:]] * 2, *[_SCALE[1:]] * 2, *[("batch", "rows", None, None)] * 2, *[_ROTATION] * 2,
               ("batch", "length"), ("rows", "new"))
ATTENDED_AXES = [("batch", "rows", "columns"), _HEADS, _HEADS]
TOGETHER_AXES = ("batch", "new", "kv_heads", None, "head_dim")
SEPARATE_AXES = [TOGETHER_AXES, *[("batch", "new", "kv_heads", "head_dim")] * 2]
RESIDUAL_AXES = (None, None, "embed")
WQKV_AXES = ("kv_heads", None, "head_part", "embed")
W_GATE_UP_AXES = (None, "mlp", "embed")


def _param(rngs, shape, axes, dtype, ones=False):
    init = nnx.initializers.ones if ones else nnx.initializers.normal(shape[-1] ** -0.5)
    # eager_sharding=False: the names are only carried; disagg.sharding turns them into NamedShardings.
    return nnx.Param(init(rngs.params(), shape, dtype), out_sharding=axes, eager_sharding=False)


def rms_norm(x, weight, eps):
    """x [..., E] -> [..., E]; the mean square in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)).astype(x.dtype) * weight


def rope_frequencies(config):
    """Angular frequency of each of the D/2 rotated pairs, float32 [D/2]."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_type == "default":
        return frequency
    # Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between the two cut-offs.
    turns = config.rope_original_length * frequency / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (keep + (1 - keep) / config.rope_factor)


def rotate(x, cos, sin):
    """RoPE on pairs (i, i + D/2). x [B,S,heads,D]; cos, sin [B,S,1,D/2] float32."""
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


def quantize(kv):
    """KV in floating point -> KV of int8 [-127, 127] with the scales: x = scale * int8, the largest of a position's head is 127."""
    def one(x):
        x = x.astype(jnp.float32)
        scale = jnp.abs(x).max(-1) / 127
        return jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None]).astype(jnp.int8), scale
    (k, k_scale), (v, v_scale) = one(kv.k), one(kv.v)
    return KV(k, v, k_scale, v_scale)


def attend(q, k, v, k_cache, v_cache, k_scale, v_scale, cos_rows, sin_rows, cos, sin, visible, causal, *, query_rows):
    """Attention of R new tokens over the cache's visible positions and over the S new tokens, queries and keys rotated here.

    The new keys and values join the softmax beside the cache because they are written to it only after the layers.
    q [B,R,K,G,D]; k, v [B,S,K,D]; k_cache, v_cache [B,K,T,D]; cos_rows, sin_rows [B,R,1,D/2] and cos, sin [B,S,1,D/2];
    visible [B,T] bool; causal [R,S] bool -> [B,R,N*D], and k, v for the cache [B,K,S,D].
    k_scale, v_scale [B,K,T] of an int8 cache, else None, are applied to scores and probabilities: T numbers and not T*D, and
    the cache is read as it is.
    """
    B, R, K, G, D = q.shape
    k_new, v_new = rotate(k, cos, sin).swapaxes(1, 2), v.swapaxes(1, 2)
    q = rotate(q.reshape(B, R, K * G, D), cos_rows, sin_rows)
    q = q.reshape(B, R, K, G, D).swapaxes(1, 2).reshape(B, K, R * G, D)
    padding = max(0, query_rows - R * G)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    causal = jnp.pad(jnp.repeat(causal, G, 0), ((0, padding), (0, 0)))

    def scores(keys, mask, scale=None):
        s = jnp.einsum("bkrd,bktd->bkrt", q, keys.astype(q.dtype), preferred_element_type=jnp.float32) * D ** -0.5
        return jnp.where(mask, s if scale is None else s * scale[:, :, None], MASKED)

    s_cache = scores(k_cache, visible[:, None, None], k_scale)
    s_new = scores(k_new, causal)
    top = jnp.maximum(s_cache.max(-1, keepdims=True, initial=MASKED), s_new.max(-1, keepdims=True))
    p_cache, p_new = jnp.exp(s_cache - top), jnp.exp(s_new - top)
    total = p_cache.sum(-1, keepdims=True) + p_new.sum(-1, keepdims=True)

    def mix(p, values, scale=None):
        p = p if scale is None else p * scale[:, :, None]
        return jnp.einsum("bkrt,bktd->bkrd", p.astype(q.dtype), values.astype(q.dtype), preferred_element_type=jnp.float32)

    out = (mix(p_cache, v_cache, v_scale) + mix(p_new, v_new)) / total
    out = out[:, :, :R * G].astype(q.dtype)
    return out.reshape(B, K, R, G, D).swapaxes(1, 2).reshape(B, R, K * G * D), k_new, v_new


def whole(function, in_axes, out_axes):
    """`function` as it is, on whole arrays; see `on_shards` in Llama.forward."""
    return function


def _zeros(shapes):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _zero_after(x):
    """An int32 zero that is known only when x is: what uses it cannot be scheduled before."""
    return (x.ravel()[0] * 0).astype(jnp.int32)


def project(x, w):
    """x [B,S,E], w [...,E] -> [B,S,...], as a product of two matrices: of more axes XLA for CPU makes two in every step."""
    return jnp.einsum("bse,oe->bso", x, w.reshape(-1, w.shape[-1])).reshape(*x.shape[:2], *w.shape[:-1])


def hold(x, axes, on_shards):
    """x, laid out by these axes."""
    return on_shards(lambda x: x, (axes,), axes)(x)


def separate(heads):
    """[B,S,K,G+2,D] -> q [B,S,K,G,D], k, v [B,S,K,D]; where heads are held in parts, they come together in one exchange."""
    return heads[:, :, :, :-2], heads[:, :, :, -2], heads[:, :, :, -1]


class Block(nnx.Module):
    """One decoder layer: attention and SwiGLU feed-forward, each behind an RMSNorm and added to the residual.

    wqkv [K,G+2,D,E]: of each kv head its G query heads, its key and its value. w_gate_up [2,F,E].
    """

    def __init__(self, config, rngs):
        c, dtype = config, jnp.dtype(config.dtype)
        self.config = c
        self.wqkv = _param(rngs, (c.num_kv_heads, c.num_heads // c.num_kv_heads + 2, c.head_dim, c.hidden_size),
                           WQKV_AXES, dtype)
        self.wo = _param(rngs, (c.hidden_size, c.num_heads * c.head_dim), ("embed", "heads"), dtype)
        self.w_gate_up = _param(rngs, (2, c.intermediate_size, c.hidden_size), W_GATE_UP_AXES, dtype)
        self.w_down = _param(rngs, (c.hidden_size, c.intermediate_size), ("embed", "mlp"), dtype)
        self.attention_norm = _param(rngs, (c.hidden_size,), ("embed",), dtype, ones=True)
        self.mlp_norm = _param(rngs, (c.hidden_size,), ("embed",), dtype, ones=True)

    def __call__(self, x, attention, on_shards):
        """x [B,S,E]; attention(q [B,S,K,G,D], k, v [B,S,K,D]) as `attend`, over this layer's cache too.

        -> x [B,S,E] and the new k, v [B,K,S,D].
        """
        eps = self.config.rms_norm_eps
        projected = lambda x, w, axes: on_shards(project, (RESIDUAL_AXES, axes), (None, None, *axes[:-1]))(x, w[...])
        heads = projected(rms_norm(x, self.attention_norm[...], eps), self.wqkv, WQKV_AXES)
        out, k, v = attention(*on_shards(separate, (TOGETHER_AXES,), SEPARATE_AXES)(heads))
        # Where the attention is split by rows, XLA would leave its result and the residual so, and gather wo in every layer.
        out = hold(out, (None, None, "heads"), on_shards)
        x = hold(x + jnp.einsum("bso,eo->bse", out, self.wo[...]), RESIDUAL_AXES, on_shards)
        gate_up = projected(rms_norm(x, self.mlp_norm[...], eps), self.w_gate_up, W_GATE_UP_AXES)
        x = x + jnp.einsum("bsf,ef->bse", nnx.silu(gate_up[:, :, 0]) * gate_up[:, :, 1], self.w_down[...])
        return hold(x, RESIDUAL_AXES, on_shards), k, v


class Llama:
    """The model as pure functions over a parameter tree; holds no arrays.

    The tree: {"embed" [V,E], "layers", "norm" [E], "head" [V,E] unless tied}; layers: {name: [L, ...]} with the names of
    Block, or, not scanned, {layer: {name: [...]}}.
    """

    def __init__(self, config):
        self.config = config
        self._block, state = nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))
        self._layer_axes = {name: param.get_metadata()["out_sharding"] for name, param in state.items()}

    def params_axes(self):
        """The logical axis names of every parameter, a tree like the parameters with a tuple for each array."""
        layers = ({name: ("layers", *names) for name, names in self._layer_axes.items()} if self.config.scan_layers
                  else {i: dict(self._layer_axes) for i in range(self.config.num_layers)})
        axes = {"embed": ("vocab", "embed"), "norm": ("embed",), "layers": layers}
        return axes if self.config.tie_embeddings else axes | {"head": ("vocab", "embed")}

    def params_shape(self):
        """A tree of jax.ShapeDtypeStruct like the parameters."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def init(self, key):
        """Random parameters: normal with variance 1 / fan-in, norms 1."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        block_keys, embed_key, head_key = jnp.split(jax.random.split(key, c.num_layers + 2), [c.num_layers, c.num_layers + 1])
        block = lambda key: nnx.to_pure_dict(nnx.state(Block(c, nnx.Rngs(key))))
        layers = jax.vmap(block)(block_keys) if c.scan_layers else {i: block(key) for i, key in enumerate(block_keys)}
        table = lambda k: jax.random.normal(k[0], (c.vocab_size, c.hidden_size), dtype) * c.hidden_size ** -0.5
        params = {"embed": table(embed_key), "layers": layers, "norm": jnp.ones(c.hidden_size, dtype)}
        return params if c.tie_embeddings else params | {"head": table(head_key)}

    def cache_shape(self, batch, length):
        """A KV of jax.ShapeDtypeStruct [L, batch, K, length, D]: what is decoded from, quantised where the config says so."""
        shape = self.working_shape(batch, length)
        return jax.eval_shape(quantize, shape) if self.config.kv_cache_dtype else shape

    def working_shape(self, batch, length):
        """... and what prompts are prefilled with, in the model's dtype."""
        c = self.config
        one = jax.ShapeDtypeStruct((c.num_layers, batch, c.num_kv_heads, length, c.head_dim), jnp.dtype(c.dtype))
        return KV(one, one)

    def axes_of(self, cache):
        """The logical axis names of each array of a cache, a KV of tuples."""
        return KV(*(None if s is None else axes for s, axes in zip(cache, KV_AXES)))

    def to_cache(self, new):
        """New positions' KV, as `forward` gives it, as the cache holds it."""
        return quantize(new) if self.config.kv_cache_dtype else new

    def init_cache(self, batch, length):
        return _zeros(self.cache_shape(batch, length))

    def init_working(self, batch, length):
        return _zeros(self.working_shape(batch, length))

    def forward(self, params, tokens, lengths, cache, *, read=None, on_shards=whole):
        """Run S new tokens of B sequences, of which `lengths` positions each are already in the cache.

        tokens [B,S] int32, lengths [B] int32, cache KV [L,B,K,T,D], either one -> normed hidden [B,S,E] and the new positions'
        KV [L,B,K,S,D] in the model's dtype. Tokens after a sequence's end (padding) do not influence those before them.
        read: how many of the cache's positions are read, at least the largest of `lengths` (None: all).
        on_shards(function, in_axes, out_axes): how a function of arrays with these logical axes is run on the devices
        that hold their shards, each computing its own part; see disagg.sharding.
        """
        c = self.config
        S = tokens.shape[1]
        read = cache.k.shape[3] if read is None else read
        positions = lengths[:, None] + jnp.arange(S)
        angle = (positions[..., None].astype(jnp.float32) * rope_frequencies(c))[:, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        visible = jnp.arange(read) < lengths[:, None]
        causal = jnp.tri(S, dtype=bool)
        mix = on_shards(functools.partial(attend, query_rows=c.query_rows), ATTEND_AXES, ATTENDED_AXES)

        def layer(x, weights, number):
            cached = jax.tree.map(lambda x: jax.lax.dynamic_slice(
                x, (number, *[0] * (x.ndim - 1)), (1, *x.shape[1:3], read, *x.shape[4:]))[0], cache)
            block = nnx.merge(self._block, nnx.State({name: nnx.Param(w) for name, w in weights.items()}))
            x, k, v = block(x, lambda q, k, v: mix(q, k, v, *cached, cos, sin, cos, sin, visible, causal), on_shards)
            return x, KV(k, v)

        x = hold(params["embed"][tokens], RESIDUAL_AXES, on_shards)
        if c.scan_layers:
            x, new = jax.lax.scan(lambda x, scanned: layer(x, *scanned), x, (params["layers"], jnp.arange(c.num_layers)))
        else:
            # Nothing of the cache may be taken out early (a copy of it, all layers at once), nor written before the last
            # layer has read it (again a copy): neither follows from the data by itself.
            news = []
            for i in range(c.num_layers):
                x, one = layer(x, params["layers"][i], i + _zero_after(x))
                news.append(one)
            new = jax.tree.map(lambda *layers: jnp.stack(layers), *news)
        # A request that overflows must not leave an inf or NaN where a later request of its slot masks the position
        # (0 * NaN is NaN), so no cache ever holds one.
        new = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, _zero_after(x).astype(a.dtype)), new)
        return rms_norm(x, params["norm"], c.rms_norm_eps), new

    def logits(self, params, x):
        """x [..., E] -> float32 [..., V]."""
        head = params["embed"] if self.config.tie_embeddings else params["head"]
        return jnp.einsum("...e,ve->...v", x, head, preferred_element_type=jnp.float32)
