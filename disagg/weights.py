"""Safetensors checkpoint -> sharded parameters; each process reads only the slices that its devices hold.

Files are memory-mapped and copied slice by slice into one buffer a device shard, converted on the way. So a load's peak
of anonymous memory is this process's shards (where they live in host memory) plus one shard of one parameter.
"""

import concurrent.futures
import json
import math
import mmap
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import tqdm
from absl import logging

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
THREADS = 4
BLOCK = 4 << 20  # bytes that a thread converts at once; its scratch memory is of this order
EVERY = 10.0     # seconds between two lines that say how far a load is


def _files(folder):
    """Tensor name -> file, from the index or the one safetensors file. Raises ValueError."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            where = {name: str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{index} is not an index of safetensors files: {e!r}") from None
        absent = sorted({f for f in where.values() if not (folder / f).is_file()})
        if absent:
            raise ValueError(f"{index} names {', '.join(absent)}, which {folder} does not have")
        if (folder / "model.safetensors").is_file() and "model.safetensors" not in where.values():
            raise ValueError(f"{folder} has both model.safetensors and {index.name}, which does not name it; expected one "
                             "of the two")
        return {name: folder / file for name, file in where.items()}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        other = sorted(f.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for f in folder.glob(pattern))
        raise ValueError(f"{folder} has {len(files)} safetensors files and no index; expected model.safetensors, or several "
                         "with model.safetensors.index.json" + (f" (found {', '.join(other[:4])}: not read)" if other else "")
                         + ("; python -m launch.convert makes such a folder of a .gguf file" if any(folder.glob("*.gguf")) else ""))
    return dict.fromkeys(_open(files[0]), files[0])


class _Tensor:
    """One tensor of a mapped file: its shape, its dtype's name in safetensors, and slices of it by indexing."""

    def __init__(self, mapped, begin, dtype, shape, data_offsets):
        self.shape, self.dtype, self._bytes = tuple(shape), dtype, mapped[begin + data_offsets[0]:begin + data_offsets[1]]

    def reshape(self, shape):
        """A read-only view: nothing is read before it is copied."""
        return self._bytes.view(jnp.dtype(DTYPES[self.dtype])).reshape(shape)


def _open(file):
    """Tensor name -> _Tensor. Raises ValueError where the file is not whole."""
    try:
        safetensors.safe_open(file, framework="np")  # the header and that its tensors fill the file
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (safetensors.SafetensorError, OSError, ValueError) as e:
        raise ValueError(f"{file} is not a whole safetensors file: {e}") from None
    header.pop("__metadata__", None)
    mapped = np.frombuffer(mapped, np.uint8)
    return {name: _Tensor(mapped, 8 + length, **fields) for name, fields in header.items()}


class Checkpoint:
    """The mapped files of one checkpoint, checked against a table of names."""

    def __init__(self, folder, table, shapes, layers, ignored=()):
        """table: parameter path -> tensor name, or (axis, names) of the tensors that it is made of, "{}" in a name for the
        layer (see models.llama_weights); shapes: tree of ShapeDtypeStruct.

        Raises ValueError that names every tensor missing, left over, or of a wrong shape or dtype.
        """
        self._table, self._shapes, self._layers = table, shapes, layers
        files = _files(folder)
        opened = {file: _open(file) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in opened[file]:
                raise ValueError(f"{file} has no tensor {name}, which the index puts there")
        held = {}
        for file, tensors in opened.items():  # also what the index leaves out
            for name in tensors:
                if name in held:
                    raise ValueError(f"tensor {name} is in two files of {folder}: {held[name].name} and {file.name}")
                held[name] = file
        self._tensors = {name: opened[file][name] for name, file in held.items()}
        self._check(folder, ignored)

    def _check(self, folder, ignored):
        wanted = tensor_shapes(self._table, self._shapes, self._layers)
        wrong = [f"{n} is missing" for n in wanted if n not in self._tensors]
        wrong += [f"{n} is not a tensor of this model" for n in self._tensors
                  if n not in wanted and not any(re.fullmatch(i, n) for i in ignored)]
        for n, shape in wanted.items():
            if n in self._tensors:
                got, dtype = self._tensors[n].shape, self._tensors[n].dtype
                if got != tuple(shape):
                    wrong.append(f"{n} has shape {list(got)}, expected {list(shape)}")
                if dtype not in DTYPES:
                    wrong.append(f"{n} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(f"checkpoint {folder}: " + "; ".join(wrong[:8]) + more)

    def load(self, shardings):
        """The parameters as a tree like `shardings`, in the dtypes of `shapes`, reading only this process's slices.

        Raises ValueError that names the tensor where a value does not fit the dtype.
        """
        params, total = {}, sum(_local_bytes(_at(self._shapes, path), _at(shardings, path)) for path in self._table)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool, _Progress(total) as progress:
            for path in self._table:
                node = params
                for key in path[:-1]:
                    node = node.setdefault(key, {})
                node[path[-1]] = self._load(path, _at(shardings, path), pool, progress)
        return params

    def _load(self, path, sharding, pool, progress):
        want = _at(self._shapes, path)
        shards = []
        for index, devices in _local_slices(want, sharding):
            shard = _empty(sharding.shard_shape(want.shape), want.dtype)
            copies = []
            for name, target, shape, place in self._places(path, shard, want.shape):
                source = self._tensors[name].reshape(shape)[index[len(index) - len(shape):]][place]
                rows = max(1, BLOCK // target[:1].nbytes)
                copies += [(name, source[i:i + rows], target[i:i + rows]) for i in range(0, len(target), rows)]
            for done in pool.map(lambda c: _copy(*c), copies):
                progress.add(done)
            # One shard at a time is on the host beside what the devices hold.
            shards += jax.block_until_ready([jax.device_put(shard, d) for d in devices])
        return jax.make_array_from_single_device_arrays(want.shape, sharding, shards)

    def _places(self, path, shard, shape):
        """[(tensor name, where it goes in the shard, the tensor's shape in the parameter's form, index of what goes there)]"""
        names, axis = _names(self._table[path])
        stacked = "{}" in names[0]
        places = []
        for i, target in enumerate(shard if stacked else [shard]):
            for name, start, count in _along(names, axis, shape[stacked:]):
                form = shape[stacked:] if axis is None else (*shape[stacked:][:axis], count, *shape[stacked:][axis + 1:])
                for j in range(count):
                    where = ... if axis is None else (slice(None),) * axis + (start + j,)
                    place = ... if axis is None else (slice(None),) * axis + (j,)
                    places.append((name.format(i), target[where], form, place))
        return places


def _names(entry):
    """(tensor names, axis along which they are joined or None) of a table's entry."""
    return ((entry,), None) if isinstance(entry, str) else (entry[1], entry[0])


def _along(names, axis, shape):
    """[(name, first place, number of places)] of the tensors along the axis of a parameter of this shape."""
    if axis is None:
        return [(names[0], 0, 1)]
    first = shape[axis] - len(names) + 1
    return [(names[0], 0, first), *[(name, first + i, 1) for i, name in enumerate(names[1:])]]


def tensor_shapes(table, shapes, layers):
    """Tensor name -> shape of all tensors that the parameters are made of; the arguments are those of Checkpoint."""
    wanted = {}
    for path, entry in table.items():
        names, axis = _names(entry)
        stacked = "{}" in names[0]
        shape = _at(shapes, path).shape[stacked:]
        for name, _, count in _along(names, axis, shape):
            rows = math.prod(shape[:-1]) // shape[axis] * count if axis is not None else None
            for i in range(layers if stacked else 1):
                wanted[name.format(i)] = shape if axis is None else (rows, shape[-1])
    return wanted


def _local_slices(want, sharding):
    """[(index, this process's devices that hold this slice)]: a slice that several devices hold is read once."""
    slices = {}
    for device, index in sharding.addressable_devices_indices_map(want.shape).items():
        slices.setdefault(repr(index), (index, []))[1].append(device)
    return list(slices.values())


def _local_bytes(want, sharding):
    return len(_local_slices(want, sharding)) * math.prod(sharding.shard_shape(want.shape)) * want.dtype.itemsize


def _empty(shape, dtype):
    """An uninitialised array on a 64-byte boundary, which a CPU device then uses as it is; any other it would copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dtype).reshape(shape)


def _copy(name, source, target):
    """Copy into `target`, converted to its dtype; -> bytes written. Raises ValueError where a finite value overflows."""
    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="unsafe")
    limit = float(jnp.finfo(target.dtype).max)
    if limit < float(jnp.finfo(source.dtype).max) and not np.isfinite(target).all():
        lost = source[np.isfinite(source) & ~np.isfinite(target)]
        if lost.size:
            raise ValueError(f"{name} holds {float(lost[0])!r}, which is too large for config.model.dtype={target.dtype} "
                             f"(at most {limit:g})")
    return target.nbytes


class _Progress:
    """Says how far the load of `total` bytes is, on process 0: a bar on a terminal, else a line in the log now and then."""

    def __init__(self, total):
        self._total, self._done, self._next = total, 0, time.monotonic() + EVERY
        self._say = jax.process_index() == 0
        self._bar = tqdm.tqdm(total=total, desc="weights", unit="B", unit_scale=True, delay=2, leave=False,
                              disable=not (self._say and sys.stderr.isatty()))

    def add(self, size):
        self._done += size
        self._bar.update(size)
        if self._say and self._bar.disable and time.monotonic() > self._next:
            self._next += EVERY
            logging.info("weights: %.1f of %.1f GB", self._done / 1e9, self._total / 1e9)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()


def _at(tree, path):
    for key in path:
        tree = tree[key]
    return tree
