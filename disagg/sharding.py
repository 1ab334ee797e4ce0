"""Logical axis -> mesh axis, one table; everything that lives on an engine is laid out by it."""

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

# Tensor parallelism: attention by heads, feed-forward by its inner axis, embeddings by vocabulary.
RULES = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp",
         "embed": None, "layers": None, "batch": None, "length": None, "head_dim": None}


def named(mesh, axes, rules=RULES):
    """The NamedSharding of an array whose axes have these logical names. Raises KeyError for a name without a rule."""
    return NamedSharding(mesh, PartitionSpec(*[rules[name] for name in axes]))


def replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def tree(mesh, shapes, axes, rules=RULES):
    """NamedShardings for a tree of shapes; `axes` is the like tree with a tuple of logical names for each array.

    Raises ValueError, naming the array, the axis and both sizes, where the mesh does not divide an axis.
    """
    def leaf(path, shape, names):
        for size, name in zip(shape.shape, names, strict=True):
            mesh_axes = rules[name]
            parts = math.prod(mesh.shape[a] for a in ([mesh_axes] if isinstance(mesh_axes, str) else mesh_axes or ()))
            if size % parts:
                raise ValueError(f"{jax.tree_util.keystr(path)}: axis '{name}' of size {size} does not divide over "
                                 f"mesh axis '{mesh_axes}' of size {parts}")
        return named(mesh, names, rules)
    return jax.tree_util.tree_map_with_path(leaf, shapes, axes)
