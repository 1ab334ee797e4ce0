"""The configs, their overrides from the command line, and what is checked before anything is loaded."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import pytest
from absl import flags
from ml_collections import config_flags

from configs import common
from disagg import roles, sharding
from disagg.cell import Limits
from models import llama, llama_weights

FOLDER = pathlib.Path(common.__file__).parent
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "common", "auto"))


def load(name, *overrides):
    """The config as the command line gives it."""
    values, argv = flags.FlagValues(), ["test", f"--config={FOLDER}/{name}", *[f"--config.{o}" for o in overrides]]
    config = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    return config.value


def leaves(config, prefix=""):
    """Dotted names of all fields."""
    for key, value in config.items():
        yield from leaves(value, f"{prefix}{key}.") if hasattr(value, "items") else [prefix + key]


def variants():
    """Every config file with each of its sizes."""
    for name in NAMES:
        sizes = re.findall(r'^    "([\w.-]+)": \(', (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
        yield from [f"{name}.py:{size}" for size in sizes] or [f"{name}.py"]


@pytest.mark.parametrize("name", list(variants()))
def test_every_config_loads(name):
    """With the fields of the common one and values that fit each other and the model."""
    config = load(name)
    assert set(leaves(config)) == set(leaves(common.get_config()))
    fields = {k: v for k, v in config.model.to_dict().items() if v is not None}
    known = {"vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_length"}
    if known <= fields.keys():
        llama.Config(**fields)
    limits = Limits.of(config, fields.get("max_length", config.cache_length))
    assert limits.buckets[-1] == config.chunk
    assert roles.local_processes(config) >= (1, 1)


# What the models' config.json files say of the architecture, in their own names, by our config.
PUBLISHED = json.loads((pathlib.Path(__file__).parent / "data" / "published_configs.json").read_text())


def test_all_published_models_are_there():
    """Every size of every config file of published models."""
    assert set(PUBLISHED) == set(variants()) - {"tiny.py"}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_as_published(tmp_path, name):
    """The config and the published file give the same model, field for field; only the dtype may be another."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    theirs, ours = llama_weights.architecture(tmp_path), load(name).model.to_dict()
    fields = {k: v for k, v in ours.items() if v is not None}
    assert fields == theirs | {"dtype": "bfloat16"} == llama_weights.merge(ours, tmp_path)
    assert theirs["dtype"] == ("float16" if name.startswith("llama2") else "bfloat16")
    llama.Config(**fields)


@pytest.mark.parametrize("name, field", [("llama3.py:3.2-1b", "rope_factor"), ("llama2.py:7b", "max_length"),
                                         ("smollm2.py:1.7b", "rope_theta")])
def test_another_models_config(tmp_path, name, field):
    """A checkpoint that differs in one field from the config is refused by the field's name."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = load(name)
    config.model[field] *= 2
    with pytest.raises(ValueError, match=f"disagree on model.{field}: config "):
        llama_weights.merge(config.model.to_dict(), tmp_path)


# The slice that a config's defaults are for: chips, and GiB of memory that the compiler grants on each.
V5E, V5P = (8, 15.75), (8, 95.73)
SLICES = {"llama2.py:70b": V5P, "llama3.py:3-70b": V5P, "llama3.py:3.1-70b": V5P,
          "smollm2.py:135m": (1, 15.75), "smollm2.py:360m": (1, 15.75)}
LANES = 128  # TPU pads the last axis of an array to this


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_defaults_fit_the_slice(name):
    """Weights and the caches of at least 32 sequences, laid out by the sharding table, leave a tenth of the memory for
    programs and activations."""
    chips, gib = SLICES.get(name, V5E)
    config = load(name)
    model = llama.Llama(llama.Config(**{k: v for k, v in config.model.to_dict().items() if v is not None}))
    mesh = jax.sharding.AbstractMesh((chips,), ("tp",))

    def bytes_a_chip(shapes, axes):
        def size(shape, s):
            *rest, last = s.shard_shape(shape.shape)
            return math.prod(rest) * -(-last // LANES) * LANES * shape.dtype.itemsize
        return sum(jax.tree.leaves(jax.tree.map(size, shapes, sharding.tree(mesh, shapes, axes))))

    weights = bytes_a_chip(model.params_shape(), model.params_axes())
    cache = bytes_a_chip(model.cache_shape(config.decode.slots + 1, config.cache_length), model.axes_of(model.cache_shape(1, 1)))  # 1: prefill's
    print(f"{name}: {weights / 2**30:.2f} + {cache / 2**30:.2f} GiB")
    assert weights + cache < 0.9 * gib * 2**30
    assert config.decode.slots >= 32
    assert config.cache_length <= model.config.max_length


def test_auto_takes_a_path():
    """The checkpoint's folder, with no architecture field set; without one the error says how to give it."""
    config = load("auto.py:some/folder")
    assert config.checkpoint == "some/folder" and not any(v is not None for v in config.model.values())
    with pytest.raises(flags.IllegalFlagValueError, match="--config=configs/auto.py:PATH"):
        load("auto.py")


@pytest.mark.parametrize("name", [n for n in NAMES if "SIZES" in (FOLDER / f"{n}.py").read_text()])
def test_an_unknown_size(name):
    """The sizes there are are named."""
    with pytest.raises(flags.IllegalFlagValueError, match=f"{name}.py has no size '9q'; sizes are"):
        load(f"{name}.py:9q")


def test_overrides():
    """Whole numbers, text, tuples, and fields that were unset."""
    config = load("tiny.py", "decode.slots=3", "mode=interleaved", "buckets=(8, 64)", "decode.tp=2", "model.num_heads=4",
                  "control.deadline_s=2.5", "prefill.slices=('a',)")
    assert (config.decode.slots, config.mode, config.buckets, config.decode.tp, config.model.num_heads) == (
        3, "interleaved", (8, 64), 2, 4)
    assert (config.control.deadline_s, config.prefill.slices) == (2.5, ("a",))


@pytest.mark.parametrize("override", ["decode.slot=3", "decod.slots=3", "slots=3", "model.num_head=4", "debug.hash=true"])
def test_a_misspelt_override(override):
    """Never ignored; the name is in the message."""
    with pytest.raises((AttributeError, KeyError), match=override.split("=")[0].split(".")[-1] + "|decod"):
        load("tiny.py", override)


@pytest.mark.parametrize("override", ["decode.slots=many", "decode.slots=2.5", "debug.hash_chain=perhaps"])
def test_an_override_of_another_type(override):
    """Refused when the flags are read."""
    with pytest.raises((flags.IllegalFlagValueError, TypeError, ValueError)):
        load("tiny.py", override)


def test_every_field_is_explained():
    """Every field of the common config is set on a line with a comment, or explained in one as `field: ...`."""
    source = (FOLDER / "common.py").read_text()
    for name in leaves(common.get_config()):
        if not name.startswith("model."):  # explained in llama.Config
            key = name.split(".")[-1]
            assert re.search(rf"\b{key} = .*#|#.*\b{key}: ", source), f"{name} has no comment"


def test_the_architecture_is_the_models():
    """The config's model fields are those of llama.Config, apart from what follows from the device."""
    assert set(common.architecture()) == {f.name for f in dataclasses.fields(llama.Config)} - {"kv_cache_dtype", "query_rows", "scan_layers"}


# Limits.


def limits(**fields):
    config = common.get_config()
    config.update_from_flattened_dict(fields)
    return Limits.of(config, 4096)


def test_limits():
    """The defaults fit; one bucket is enough; chunks may fill the cache exactly."""
    assert limits() == Limits(2048, (64, 128, 256, 512), (512, 2048), 8, 4, 2, 2, 2**30, 2**32, 1000, 8, 0, 0)
    assert limits(reads=()).reads == (2048,)
    assert limits(reads=(256, 1024, 2048, 4096)).reads == (256, 1024, 2048)  # what reaches over the cache is all of it
    assert limits(**{"cache_length": 512, "buckets": (512,)}).buckets == (512,)
    assert limits(**{"cache_length": 1024, "reads": (256, 512, 1024, 4096)}).reads == (256, 512, 1024)
    assert limits(reads=()).reads == (2048,)


@pytest.mark.parametrize("fields, message", [
    ({"cache_length": 2000}, r"cache_length \(2000\) must be a multiple of config.chunk \(512\)"),
    ({"cache_length": 256}, r"cache_length \(256\) must be a multiple of config.chunk \(512\)"),
    ({"cache_length": 8192}, r"cache_length \(8192\) is over the model's max_length \(4096\)"),
    ({"cache_length": 0}, "config.cache_length must be at least 1, got 0"),
    ({"chunk": 256}, r"the last of config.buckets \(64, 128, 256, 512\) must be config.chunk \(256\)"),
    ({"buckets": ()}, r"config.buckets must be ascending and positive, got \(\)"),
    ({"buckets": (256, 128, 512)}, r"config.buckets must be ascending and positive, got \(256, 128, 512\)"),
    ({"buckets": (64, 64, 512)}, "config.buckets must be ascending"),
    ({"buckets": (0, 512)}, r"config.buckets must be ascending and positive, got \(0, 512\)"),
    ({"reads": (0,)}, r"config.reads must be ascending and positive, got \(0,\)"),
    ({"reads": (512, 256)}, r"config.reads must be ascending and positive, got \(512, 256\)"),
    ({"reads": (512, 256)}, r"config.reads must be ascending and positive, got \(512, 256\)"),
    ({"reads": (0, 256)}, r"config.reads must be ascending and positive, got \(0, 256\)"),
    ({"decode.slots": 0}, "config.decode.slots must be at least 1, got 0"),
    ({"decode.steps": -1}, "config.decode.steps must be at least 1, got -1"),
    ({"prefill.ahead": 0}, "config.prefill.ahead must be at least 1, got 0"),
    ({"prefill.batch": 0}, "config.prefill.batch must be at least 1, got 0"),
    ({"decode.prefill_up_to": 513}, r"config.decode.prefill_up_to must be from 0 to config.chunk \(512\), got 513"),
    ({"max_queue": 0}, "config.max_queue must be at least 1, got 0"),
    ({"decode.ahead": 0}, "config.decode.ahead must be at least 1, got 0"),
    ({"top_logits": -1}, "config.top_logits must not be negative, got -1"),
])
def test_limits_that_do_not_fit(fields, message):
    """The field and the numbers."""
    with pytest.raises(ValueError, match=message):
        limits(**fields)
