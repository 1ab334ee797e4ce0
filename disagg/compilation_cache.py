"""JAX's persistent compilation cache, on in every process.

JAX writes the cache from process 0 only, so what only the other processes compile (all of the decode engines) would be
compiled again at each start. Each process gets a folder of its own here, and the writer's test of the process id is
answered with 0. It is the one place that knows of it: if a later JAX moves the test, the cache is lost, nothing else.
"""

import pathlib
import types

import jax
from jax._src import compiler


def enable(folder, process, num_processes):
    """Keep compiled programs of this process under `folder`; '' leaves the cache off.

    Raises ValueError if the folder cannot be made.
    """
    if not folder:
        return
    path = pathlib.Path(folder).expanduser() / f"{process}-of-{num_processes}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"config.compilation_cache={folder!r}: cannot make {path}: {e.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    write = getattr(compiler, "_cache_write", None)
    if isinstance(write, types.FunctionType) and "distributed" in write.__globals__:
        answer = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
        compiler._cache_write = types.FunctionType(write.__code__, write.__globals__ | {"distributed": answer},
                                                   write.__name__, write.__defaults__, write.__closure__)
