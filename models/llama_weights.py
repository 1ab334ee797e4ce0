"""Hugging Face Llama checkpoints: names of tensors -> parameters, and config.json -> architecture, as tables."""

import json
import math
import pathlib

# Parameter -> tensor name; {} is the layer's number: those tensors are stacked along the first axis. Where several tensors
# are one parameter: (axis of one layer's parameter, names). Every one but the first has one place on that axis, the first
# the rest of it.
TENSORS = {
    ("embed",): "model.embed_tokens.weight",
    ("norm",): "model.norm.weight",
    ("head",): "lm_head.weight",
    ("layers", "wqkv"): (1, ("model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.self_attn.k_proj.weight",
                             "model.layers.{}.self_attn.v_proj.weight")),
    ("layers", "wo"): "model.layers.{}.self_attn.o_proj.weight",
    ("layers", "w_gate_up"): (0, ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight")),
    ("layers", "w_down"): "model.layers.{}.mlp.down_proj.weight",
    ("layers", "attention_norm"): "model.layers.{}.input_layernorm.weight",
    ("layers", "mlp_norm"): "model.layers.{}.post_attention_layernorm.weight",
}

# Tensors that some checkpoints hold and no model needs: a buffer, and a copy of the embeddings where they are tied.
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
IGNORED_WHEN_TIED = (r"lm_head\.weight",)

FIELDS = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
          "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "max_length": "max_position_embeddings",
          "rms_norm_eps": "rms_norm_eps"}
LLAMA3_ROPE = {"rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor", "rope_high_freq_factor": "high_freq_factor",
               "rope_original_length": "original_max_position_embeddings"}
FRACTIONS = ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")  # all other fields are whole numbers
DTYPES = ("float32", "bfloat16", "float16")
# The only values that this model has, of fields that ask for something else in other files; null is absent.
ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleaved": False,
        "partial_rotary_factor": 1, "sliding_window": None, "quantization_config": None}


def tensors(tied, layers=None):
    """The table for one model; layers: how many it has where each has parameters of its own, None where they are stacked."""
    table = {path: names for path, names in TENSORS.items() if not (tied and path == ("head",))}
    if layers is None:
        return table
    of = lambda names, i: names.format(i) if isinstance(names, str) else (names[0], tuple(n.format(i) for n in names[1]))
    return {path: names for path, names in table.items() if path[0] != "layers"} | {
        ("layers", i, path[1]): of(names, i) for i in range(layers) for path, names in table.items() if path[0] == "layers"}


def patterns(tied):
    """Every tensor name of the table, with {} for the layer."""
    return [name for names in tensors(tied).values() for name in ([names] if isinstance(names, str) else names[1])]


def ignored(tied):
    return IGNORED + (IGNORED_WHEN_TIED if tied else ())


def architecture(folder):
    """The fields of llama.Config that folder/config.json gives.

    Raises ValueError if the file is missing or not JSON, lacks a field, or asks for what this model does not have.
    """
    file = pathlib.Path(folder) / "config.json"
    if not pathlib.Path(folder).is_dir():
        raise ValueError(f"no checkpoint folder at {folder}")
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json")
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON: {e}") from None
    if not isinstance(hf, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(hf).__name__}")
    _refuse_unsupported(file, hf)
    _check_numbers(file, hf, FIELDS.values(), optional=("num_key_value_heads", "head_dim"))
    fields = {ours: hf[theirs] for ours, theirs in FIELDS.items()}
    fields["num_kv_heads"] = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    fields["head_dim"] = _head_dim(file, hf)
    fields["tie_embeddings"] = hf.get("tie_word_embeddings") or False
    if not isinstance(fields["tie_embeddings"], bool):
        raise ValueError(f"{file}: tie_word_embeddings must be true or false, got {fields['tie_embeddings']!r}")
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"{file}: dtype {dtype!r} is not supported; expected one of {', '.join(DTYPES)}")
    fields["dtype"] = dtype
    return fields | _rope(file, hf)


def _refuse_unsupported(file, hf):
    for name, value in ONLY.items():
        if hf.get(name) is not None and hf[name] != value:
            raise ValueError(f"{file}: not supported: {name}={hf[name]!r} (supported: {value!r})")


def _head_dim(file, hf):
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    if not hf.get("head_dim") and hidden % heads:
        raise ValueError(f"{file}: without head_dim, hidden_size ({hidden}) must be a multiple of num_attention_heads "
                         f"({heads})")
    return hf.get("head_dim") or hidden // heads


def _check_numbers(file, fields, required, optional=()):
    """Raises ValueError unless these fields are positive numbers, whole ones except for FRACTIONS; null is absent."""
    missing = [name for name in required if fields.get(name) is None]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    for name in (*required, *optional):
        value, whole = fields.get(name), name not in FRACTIONS
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise ValueError(f"{file}: {name} must be a positive {'whole ' if whole else ''}number, got {value!r}")


def _rope(file, hf):
    """RoPE fields from rope_parameters (newer files) or rope_theta and rope_scaling."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: RoPE's parameters must be a JSON object, got {rope!r}")
    if hf.get("rope_scaling") not in (None, {}, rope):
        raise ValueError(f"{file}: rope_parameters {rope!r} and rope_scaling {hf['rope_scaling']!r} differ; expected one of "
                         "them")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{file}: not supported: RoPE's parameters by kind of layer: {rope!r}")
    _refuse_unsupported(file, rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"{file}: not supported: RoPE scaling {kind!r} (supported: 'default', 'llama3')")
    theta = 10000.0 if hf.get("rope_theta") is None else hf["rope_theta"]
    rope = {"rope_theta": theta} | {name: value for name, value in rope.items() if value is not None}
    names = {"rope_theta": "rope_theta"} | (LLAMA3_ROPE if kind == "llama3" else {})
    _check_numbers(file, rope, names.values())
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"{file}: low_freq_factor ({rope['low_freq_factor']}) must be below high_freq_factor "
                         f"({rope['high_freq_factor']})")
    return {"rope_type": kind} | {ours: float(rope[theirs]) if theirs in FRACTIONS else rope[theirs]
                                  for ours, theirs in names.items()}


def merge(configured, folder):
    """Keyword arguments of llama.Config: the configured fields, those that are None taken from folder/config.json.

    configured: dict. dtype alone may differ from the checkpoint's: weights are converted. Raises ValueError naming the
    field and both values where a configured one disagrees.
    """
    theirs = architecture(folder)
    wrong = [f"{name}: config {value!r}, checkpoint {theirs[name]!r}" for name, value in configured.items()
             if value is not None and name != "dtype" and name in theirs and value != theirs[name]]
    if wrong:
        raise ValueError(f"the config and {folder}/config.json disagree on " + "; ".join(f"model.{w}" for w in wrong))
    return theirs | {name: value for name, value in configured.items() if value is not None}
