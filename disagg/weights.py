"""Safetensors checkpoint -> sharded parameters; each process reads only the slices that its devices hold."""

import json
import pathlib
import re

import jax
import numpy as np
import safetensors

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _files(folder):
    """Tensor name -> file, from the index or the one safetensors file. Raises ValueError."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            where = {name: str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{index} is not an index of safetensors files: {e!r}") from None
        absent = sorted({f for f in where.values() if not (folder / f).is_file()})
        if absent:
            raise ValueError(f"{index} names {', '.join(absent)}, which {folder} does not have")
        return {name: folder / file for name, file in where.items()}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        other = sorted(f.name for pattern in ("*.bin", "*.pth", "*.gguf") for f in folder.glob(pattern))
        raise ValueError(f"{folder} has {len(files)} safetensors files and no index; expected model.safetensors, or several "
                         "with model.safetensors.index.json" + (f" (found {', '.join(other[:4])}: not read)" if other else ""))
    with _open(files[0]) as f:
        return {name: files[0] for name in f.keys()}


def _open(file):
    try:
        return safetensors.safe_open(file, framework="np")
    except (safetensors.SafetensorError, OSError) as e:
        raise ValueError(f"{file} is not a whole safetensors file: {e}") from None


class Checkpoint:
    """The open files of one checkpoint, checked against a table of names."""

    def __init__(self, folder, table, shapes, layers, ignored=()):
        """table: parameter path -> tensor name, "{}" in it for the layer; shapes: tree of ShapeDtypeStruct.

        Raises ValueError that names every tensor missing, left over, or of a wrong shape or dtype.
        """
        self._table, self._shapes, self._layers = table, shapes, layers
        files = _files(folder)
        self._open = {file: _open(file) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in self._open[file].keys():
                raise ValueError(f"{file} has no tensor {name}, which the index puts there")
        held = {name: file for file in self._open for name in self._open[file].keys()}  # also what the index leaves out
        self._slices = {name: self._open[file].get_slice(name) for name, file in (held | files).items()}
        self._check(folder, ignored)

    def _names(self, path):
        name = self._table[path]
        return [name.format(i) for i in range(self._layers)] if "{}" in name else [name]

    def _check(self, folder, ignored):
        wanted = {}
        for path in self._table:
            names, shape = self._names(path), _at(self._shapes, path).shape
            wanted |= {n: shape[1:] if "{}" in self._table[path] else shape for n in names}
        wrong = [f"{n} is missing" for n in wanted if n not in self._slices]
        wrong += [f"{n} is not a tensor of this model" for n in self._slices
                  if n not in wanted and not any(re.fullmatch(i, n) for i in ignored)]
        for n, shape in wanted.items():
            if n in self._slices:
                got, dtype = tuple(self._slices[n].get_shape()), self._slices[n].get_dtype()
                if got != tuple(shape):
                    wrong.append(f"{n} has shape {list(got)}, expected {list(shape)}")
                if dtype not in DTYPES:
                    wrong.append(f"{n} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(f"checkpoint {folder}: " + "; ".join(wrong[:8]) + more)

    def load(self, shardings):
        """The parameters as a tree like `shardings`, in the dtypes of `shapes`, reading only this process's slices."""
        params = {}
        for path in self._table:
            node = params
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = self._load(path, _at(shardings, path))
        return params

    def _load(self, path, sharding):
        want, names, stacked = _at(self._shapes, path), self._names(path), "{}" in self._table[path]
        read = {}

        def shard(index):
            key = repr(index)  # a slice that several devices hold is read once
            if key not in read:
                if stacked:
                    read[key] = np.empty(sharding.shard_shape(want.shape), want.dtype)
                    for i, n in enumerate(names):
                        read[key][i] = self._slices[n][index[1:]]
                else:
                    read[key] = self._slices[names[0]][index].astype(want.dtype)
            return read[key]

        return jax.make_array_from_callback(want.shape, sharding, shard)


def _at(tree, path):
    for key in path:
        tree = tree[key]
    return tree
