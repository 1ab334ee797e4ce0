"""Twelve small Llamas with random weights that any machine makes alike, and their logits by transformers.

  python -m tests.random_llamas        # remakes tests/data/random_llamas.json; needs the extra goldens

Weights: for tensor number t of model m, numpy's PCG64 seeded with (m, t) gives 64-bit words w in the tensor's order
(C order; the tensors in the order of `tensors`); an element is (2 * (w >> 11) / 2^53 - 1) * sqrt(3) * std, so uniform with
that standard deviation, plus 1 in norms, rounded to float32. The bit generator's words, unlike numpy's distributions, are
the same in every version.
"""

import json
import math
import pathlib

import numpy as np
from safetensors.numpy import save_file

FILE = pathlib.Path(__file__).parent / "data" / "random_llamas.json"
PROMPTS = (24, 17)   # tokens of the two prompts
STEPS = 4            # tokens that follow each, one by one
STRIDE = 7           # every seventh logit is kept in the file


def _model(m, groups, head_dim, kv_heads, hidden, layers, tied, eps, theta, llama3):
    """The config.json of one model, in the names of transformers."""
    rope = {"rope_type": "default", "rope_theta": theta}
    if llama3:
        rope |= dict(zip(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), llama3),
                     rope_type="llama3")
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96 + 8 * m, "hidden_size": hidden,
            "intermediate_size": 2 * hidden + 8, "num_hidden_layers": layers, "num_attention_heads": groups * kv_heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": 128, "rms_norm_eps": eps,
            "tie_word_embeddings": tied, "rope_parameters": rope, "dtype": "float32"}


#                            groups  head dim  kv heads  hidden  layers  tied  eps  theta  llama3: factor, low, high, original
MODELS = [_model(m, *fields) for m, fields in enumerate([
    (1, 64, 2, 96, 2, False, 1e-5, 1e4, None),
    (1, 80, 3, 120, 3, True, 1e-6, 5e5, (8.0, 1.0, 4.0, 32)),
    (1, 128, 1, 64, 2, False, 1e-2, 1e5, None),
    (2, 64, 3, 72, 2, True, 1e-3, 500.0, None),
    (2, 80, 2, 128, 2, False, 1e-5, 1e4, (32.0, 1.0, 4.0, 16)),
    (2, 128, 2, 96, 3, True, 1e-5, 1.3e5, None),
    (4, 64, 2, 160, 2, False, 1e-6, 5e5, (8.0, 1.0, 4.0, 64)),
    (4, 80, 1, 96, 2, True, 1e-5, 1e4, None),
    (4, 128, 2, 80, 2, False, 1e-3, 100.0, (4.0, 0.5, 8.0, 24)),
    (8, 64, 1, 64, 3, True, 1e-5, 5e5, (32.0, 1.0, 4.0, 32)),
    (8, 80, 2, 80, 2, False, 1e-6, 1e5, None),
    (8, 128, 1, 128, 2, True, 1e-2, 1e4, (8.0, 1.0, 2.0, 16)),
])]


def tensors(m):
    """Tensor name -> float32 array of model m."""
    c = MODELS[m]
    E, F, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    N, K = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for i in range(c["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {attention + "q_proj.weight": (N, E), attention + "k_proj.weight": (K, E),
                   attention + "v_proj.weight": (K, E), attention + "o_proj.weight": (E, N), mlp + "gate_proj.weight": (F, E), mlp + "up_proj.weight": (F, E),
                   mlp + "down_proj.weight": (E, F), f"model.layers.{i}.input_layernorm.weight": (E,),
                   f"model.layers.{i}.post_attention_layernorm.weight": (E,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)

    def values(t, name, shape):
        std = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5  # attention far from even, logits far from flat
        words = np.random.PCG64([m, t]).random_raw(math.prod(shape))
        x = (2 * ((words >> np.uint64(11)).astype(np.float64) / 2**53) - 1) * math.sqrt(3) * std
        return ((len(shape) == 1) + x).astype(np.float32).reshape(shape)
    return {name: values(t, name, shape) for t, (name, shape) in enumerate(shapes.items())}


def write(m, folder):
    """Model m as a checkpoint folder."""
    (folder / "config.json").write_text(json.dumps(MODELS[m]))
    save_file(tensors(m), folder / "model.safetensors")


def tokens(m):
    """int32 [2, longest prompt + STEPS]; the shorter sequence ends earlier, what follows is 0."""
    words = np.random.PCG64([m, 1000]).random_raw(2 * (max(PROMPTS) + STEPS)).reshape(2, -1)
    ids = (words % np.uint64(MODELS[m]["vocab_size"])).astype(np.int32)
    return np.where(np.arange(ids.shape[1]) < np.array(PROMPTS)[:, None] + STEPS, ids, 0)


def theirs(m):
    """Model m in transformers, float32."""
    import torch
    import transformers
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODELS[m]))
    left = model.load_state_dict({n: torch.from_numpy(t) for n, t in tensors(m).items()}, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}
    return model.float().eval()


def their_logits(model, m):
    """float32 [2][prompt + STEPS, vocabulary] of both sequences, each alone and whole."""
    import torch
    with torch.no_grad():
        return [model(torch.tensor(ids[None, :n + STEPS])).logits[0].numpy() for ids, n in zip(tokens(m), PROMPTS)]


def kept(logits):
    """What the file has of a model's logits: every seventh, at each sequence's first and last prompt token and each step."""
    return [[x[i, ::STRIDE] for i in (0, *range(n - 1, n + STEPS))] for x, n in zip(logits, PROMPTS)]


if __name__ == "__main__":
    models = []
    for m in range(len(MODELS)):
        logits = their_logits(theirs(m), m)
        rows = [[[round(float(v), 5) for v in row] for row in sequence] for sequence in kept(logits)]
        models.append({"largest": max(round(float(np.abs(x).max()), 5) for x in logits), "logits": rows})
    FILE.write_text("[\n" + ",\n".join(json.dumps(x) for x in models) + "\n]\n")
