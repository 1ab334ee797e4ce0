"""Logical axis -> mesh axes, one table a role; everything that lives on an engine is laid out by it.

Tensor parallelism: attention by heads, feed-forward by its inner axis, embeddings by vocabulary, over the mesh axis "tp".
Where the kv heads do not divide over an engine's devices, its mesh gets a second axis: gcd(kv heads, devices) groups over
"tp", and the devices of a group, "split", share its heads. A decode engine then splits its slots over them, cache and
attention alike, so nothing is held twice; a prefill engine, whose working cache is one prompt's, holds that cache on all
of them and splits the chunk's queries. Weights are cut over all devices in either case; those of a group
cut the projections to its heads by the heads' dimensions ("head_part").
"""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ALL = ("tp", "split")
RULES = {"vocab": ALL, "heads": ALL, "mlp": ALL, "kv_heads": "tp", "head_part": "split", "columns": "tp", "wire": ALL,
         "batch": None, "rows": None, "new": None, "embed": None, "layers": None, "length": None, "head_dim": None, None: None}
PREFILL = RULES | {"rows": "split"}
DECODE = RULES | {"batch": "split"}


def attention_mesh(mesh, kv_heads):
    """The engine's mesh, a flat one, with the axis "split" where kv_heads does not divide over it."""
    groups = math.gcd(kv_heads, mesh.size)
    return mesh if groups == mesh.size else Mesh(mesh.devices.reshape(groups, -1), ALL)


def describe(mesh, kv_heads, role, slots, buckets):
    """How the attention of an engine on this flat mesh is split, in words.

    Raises ValueError, with the numbers, where what would be split besides the kv heads does not divide either.
    """
    devices, groups = mesh.size, math.gcd(kv_heads, mesh.size)
    if groups == devices:
        return f"{kv_heads} kv heads over {devices} devices"
    share = devices // groups
    sizes = {"every length in config.buckets": buckets} | ({"config.decode.slots": [slots]} if role == "decode" else {})
    for field, values in sizes.items():
        if wrong := [n for n in values if n % share]:
            raise ValueError(f"{kv_heads} kv heads do not divide over config.{role}.tp={devices} devices; {share} devices would "
                             f"share each group of heads, for which {field} must be a multiple of {share}, got {wrong[0]}")
    what = (f"which split the {slots} slots" if role == "decode"
            else "which split a chunk's queries and each hold the working cache")
    return f"{kv_heads} kv heads do not divide over {devices} devices: {groups} groups of {share} devices, {what}"


def _spec(mesh, axes, rules):
    def of(name):
        parts = tuple(a for a in np.atleast_1d(rules[name] or ()) if a in mesh.axis_names)
        return parts[0] if len(parts) == 1 else parts or None
    return PartitionSpec(*map(of, axes))


def named(mesh, axes, rules=RULES):
    """The NamedSharding of an array whose axes have these logical names. Raises KeyError for a name without a rule."""
    return NamedSharding(mesh, _spec(mesh, axes, rules))


def replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def tree(mesh, shapes, axes, rules=RULES):
    """NamedShardings for a tree of shapes; `axes` is the like tree with a tuple of logical names for each array.

    Raises ValueError, naming the array, the axis and both sizes, where the mesh does not divide an axis.
    """
    def leaf(path, shape, names):
        layout = named(mesh, names, rules)
        for size, name, mesh_axes in zip(shape.shape, names, layout.spec, strict=True):
            parts = math.prod(mesh.shape[a] for a in ([mesh_axes] if isinstance(mesh_axes, str) else mesh_axes or ()))
            if size % parts:
                raise ValueError(f"{jax.tree_util.keystr(path)}: axis '{name}' of size {size} does not divide over "
                                 f"mesh axis '{mesh_axes}' of size {parts}")
        return layout
    return jax.tree_util.tree_map_with_path(leaf, shapes, axes)


def on_shards(mesh, rules):
    """on_shards(function, in_axes, out_axes): the function run by every device on its own shards of arrays with these
    logical axes; out_axes is a list where there are several results.

    Arrays laid out in another way are moved first: parts of the heads' dimensions become whole heads of a part of the batch.
    """
    specs = lambda axes: tuple(_spec(mesh, one, rules) for one in axes)

    def wrap(function, in_axes, out_axes):
        out_specs = specs(out_axes) if isinstance(out_axes, list) else _spec(mesh, out_axes, rules)
        return jax.shard_map(function, mesh=mesh, in_specs=specs(in_axes), out_specs=out_specs, check_vma=False)
    return wrap
