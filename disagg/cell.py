"""One process's part of a cell: everything between the topology and the front end, put together."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
from absl import logging

from disagg import sampling, selftest, sharding
from disagg.chunk import Format, shardings
from disagg.control import Control, ControlError
from disagg.decode import DecodeEngine
from disagg.leader import Leader
from disagg.loop import Loop, Stopped
from disagg.metrics import Metrics
from disagg.prefill import PrefillEngine
from disagg.scheduler import Scheduler, batch_sizes, read_length
from disagg.stages import Stages
from disagg.trace import Trace
from disagg.transfer import Transfers


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the engines are compiled for; checked against each other and the model here, before anything is loaded."""

    cache_length: int
    buckets: tuple[int, ...]
    reads: tuple[int, ...]
    slots: int
    steps: int
    prefill_ahead: int
    decode_ahead: int
    pair_bytes: int
    total_bytes: int
    max_queue: int
    batch: int
    local_length: int
    top: int

    def __post_init__(self):
        for name, value in {"cache_length": self.cache_length, "decode.slots": self.slots, "decode.steps": self.steps,
                            "prefill.ahead": self.prefill_ahead, "decode.ahead": self.decode_ahead, "max_queue": self.max_queue,
                            "prefill.batch": self.batch}.items():
            if value < 1:
                raise ValueError(f"config.{name} must be at least 1, got {value}")
        if list(self.buckets) != sorted(set(self.buckets)) or not self.buckets or self.buckets[0] < 1:
            raise ValueError(f"config.buckets must be ascending and positive, got {self.buckets}")
        if not 0 <= self.local_length <= self.buckets[-1]:
            raise ValueError(f"config.decode.prefill_up_to must be from 0 to config.chunk ({self.buckets[-1]}), got {self.local_length}")
        if list(self.reads) != sorted(set(self.reads)) or self.reads[0] < 1:
            raise ValueError(f"config.reads must be ascending and positive, got {self.reads[:-1]}")
        if self.cache_length % self.buckets[-1]:
            # Else a padded chunk could reach over the cache's end, where the write would be shifted in silence.
            raise ValueError(f"config.cache_length ({self.cache_length}) must be a multiple of config.chunk ({self.buckets[-1]})")

    @classmethod
    def of(cls, config, model_length):
        """From the config. Raises ValueError with the numbers."""
        if config.buckets and config.buckets[-1] != config.chunk:
            raise ValueError(f"the last of config.buckets {config.buckets} must be config.chunk ({config.chunk})")
        if config.cache_length > model_length:
            raise ValueError(f"config.cache_length ({config.cache_length}) is over the model's max_length ({model_length})")
        if config.top_logits < 0:
            raise ValueError(f"config.top_logits must not be negative, got {config.top_logits}")
        reads = (*(n for n in config.reads if n < config.cache_length), config.cache_length)
        return cls(config.cache_length, tuple(config.buckets), reads, config.decode.slots, config.decode.steps,
                   config.prefill.ahead, config.decode.ahead, config.transfer.pair_bytes, config.transfer.total_bytes, config.max_queue,
                   config.prefill.batch, 0 if config.mode == "interleaved" else config.decode.prefill_up_to, config.top_logits)

    def check_chunks(self, form):
        """Raises ValueError where the largest chunk could never be sent."""
        largest = form.bytes(self.buckets[-1])
        for name, limit in {"pair_bytes": self.pair_bytes, "total_bytes": self.total_bytes}.items():
            if limit < largest:
                raise ValueError(f"config.transfer.{name} ({limit}) must be at least what one chunk of config.chunk="
                                 f"{self.buckets[-1]} positions moves, {largest} bytes")

    def scheduler(self, prefill, decode, interleaved, chunk_bytes):
        """The Scheduler of engines with these processes; chunk_bytes: bucket -> what a chunk of it moves."""
        return Scheduler(prefill=prefill, decode=decode, interleaved=interleaved, slots=self.slots, buckets=self.buckets,
                         reads=self.reads, steps=self.steps, prefill_ahead=self.prefill_ahead, decode_ahead=self.decode_ahead,
                         batch=self.batch, chunk_bytes=chunk_bytes, pair_bytes=self.pair_bytes, total_bytes=self.total_bytes,
                         max_queue=self.max_queue, local_length=self.local_length)


def run(config, prepare, topology, *, client=None, name="cell"):
    """Serve until the front end is done or the cell cannot go on; -> None, or why it ended early.

    prepare() -> (model, load, front), whose errors end the start on every process. load(shardings): the parameters as a
    tree laid out by `shardings` (see disagg.weights). front(leader), on process 0 and called in a thread: submits
    requests and returns when it has all answers. client: the coordination service's. name: keeps apart several runs of
    one job.
    """
    c = config.control
    control = Control(client, topology.process, topology.num_processes, heartbeat_s=c.heartbeat_s,
                      deadline_s=c.deadline_s, stall_s=c.stall_s, name=name)
    try:
        error = _serve(config, prepare, topology, control)
    except (Stopped, ControlError) as e:
        error = str(e)
    except BaseException as e:
        control.report("failed", f"{type(e).__name__}: {e}")
        raise
    finally:
        missing = control.close()
    if missing and not error:
        error = f"processes {missing} did not end in order"
    return error


def _serve(config, prepare, topology, control):
    model, load, front = _agreed(control, config, prepare)
    limits = _agreed(control, config, lambda: Limits.of(config, model.config.max_length))
    form = _agreed(control, config, lambda: chunk_format(config, model, topology, limits))
    engines = _agreed(control, config, lambda: load_engines(model, topology, limits, form, load))
    transfers = _agreed(control, config, lambda: _connect(topology, limits, form, engines, config.control.start_s))
    trace = _agreed(control, config, lambda: Trace(config.debug.trace, topology.process))
    loop = Loop(topology, control, transfers, *engines, trace, hash_chain=config.debug.hash_chain)
    try:
        if topology.process:
            return loop.run()
        return _lead(config, topology, limits, form, control, loop, front)
    finally:
        trace.save()


def _lead(config, topology, limits, form, control, loop, front):
    """Process 0: the leader and the front end in threads of their own, beside the loop."""
    chunk_bytes = {bucket: form.bytes(bucket) for bucket in limits.buckets}
    scheduler = limits.scheduler([e.processes for e in topology.prefill], [e.processes for e in topology.decode],
                                 topology.mode == "interleaved", chunk_bytes)
    metrics = Metrics(scheduler, control, len(topology.decode))
    leader = Leader(control, scheduler, Stages(topology, chunk_bytes, form.row_bytes, metrics), metrics, max_queue=limits.max_queue,
                    deadline_s=config.control.deadline_s, stall_s=config.control.stall_s)
    leader.start()
    front_end = threading.Thread(target=_run_front, args=(front, leader), name="front end", daemon=True)
    front_end.start()
    loop.run()
    leader.join()
    front_end.join(config.control.deadline_s)  # it has got all answers there will be
    return leader.error


def _run_front(front, leader):
    try:
        front(leader)
    except OSError as e:
        leader.stop(str(e))
    except Exception as e:  # whatever it is, the cell must end with it
        logging.exception("the front end failed")
        leader.stop(f"{type(e).__name__}: {e}")
    else:
        leader.stop()


def _agreed(control, config, step):
    """Run a step of the start-up on every process and go on only if it went well on all. Raises Stopped on all, if not."""
    error = result = None
    try:
        result = step()
    except (ValueError, OSError, RuntimeError) as e:  # JAX's errors are RuntimeErrors
        error = f"process {control.process}: {e}"
    control.report("ready", error)
    if control.process == 0:
        control.publish([["stop", why]] if (why := _first_error(control, config.control.start_s)) else [])
    _, ops = control.next(config.control.start_s)
    if ops:
        raise Stopped(ops[0][1])
    return result


def _first_error(control, start_s):
    """Process 0: wait for all processes' word; -> the first error, or None."""
    waiting, end = set(range(control.num_processes)), time.monotonic() + start_s
    while waiting:
        for process, (kind, *details) in control.receive(0.2):
            if kind in ("gone", "goodbye", "failed"):
                return f"process {process} left during the start" + (f": {details[0]}" if details else "")
            if details[0]:
                return details[0]
            waiting.discard(process)
        for _, why in control.lost():
            return f"{why} during the start"
        if time.monotonic() > end:
            return f"processes {sorted(waiting)} were not ready within config.control.start_s={start_s:.0f} s"
    return None


def chunk_format(config, model, topology, limits):
    """How chunks travel in this job. Raises ValueError if they are too large for the limits."""
    if config.transfer.piece_bytes < 1:
        raise ValueError(f"config.transfer.piece_bytes must be at least 1, got {config.transfer.piece_bytes}")
    form = Format(model, max(e.mesh.size for e in (*topology.prefill, *topology.decode)), config.transfer.piece_bytes,
                  config.transfer.checksum and bool(topology.pairs), batch_sizes(limits.buckets, limits.batch)[limits.buckets[0]][-1])
    if topology.pairs:
        limits.check_chunks(form)
    return form


def load_engines(model, topology, limits, form, load):
    """The engines of this process: (PrefillEngine, DecodeEngine, the PrefillEngine of config.decode.prefill_up_to), None where it
    has none."""
    roles = [(e, e.role) for e in (*topology.prefill, *topology.decode)] + [(e, "prefill") for e in topology.decode if limits.local_length]
    for engine, role in roles:
        how = sharding.describe(engine.mesh, model.config.num_kv_heads, role, limits.slots, limits.buckets)
        if topology.process == 0:
            logging.info("%s: %s", engine.name, how)
    params = {}
    for engine in (topology.my_prefill, topology.my_decode):
        if engine is not None and engine.mesh not in params:  # an interleaved engine is both on one mesh
            mesh = sharding.attention_mesh(engine.mesh, model.config.num_kv_heads)
            shardings = sharding.tree(mesh, model.params_shape(), model.params_axes())
            started = time.monotonic()
            params[engine.mesh] = jax.block_until_ready(load(shardings))
            logging.info("weights on %s in %.1f s", engine.name, time.monotonic() - started)
    prefill, decode = topology.my_prefill, topology.my_decode
    prefills = lambda mesh, cache_length: PrefillEngine(model, params[mesh], mesh, form, cache_length=cache_length, buckets=limits.buckets,
                                                        top=limits.top)
    return (prefill and prefills(prefill.mesh, limits.cache_length),
            decode and DecodeEngine(model, params[decode.mesh], decode.mesh, slots=limits.slots,
                                    cache_length=limits.cache_length, top=limits.top),
            decode and limits.local_length and prefills(decode.mesh, 1) or None)  # whole prompts need no working cache


def _connect(topology, limits, form, engines, start_s):
    """Open and test every way between engines, and compile everything meanwhile."""
    transfers = Transfers(form, topology)
    started = time.monotonic()
    rates = selftest.run(topology, transfers, limits.buckets, start_s / 2,
                         lambda: _warm_up(topology, limits, form, *engines))
    for (p, d), rate in rates.items():
        logging.info("self-test from %s to %s: values right, %.3f GB/s, %d calls a chunk", topology.prefill[p].name,
                     topology.decode[d].name, rate, len(transfers.routes[p, d].calls))
    logging.info("compiled, and %d engine pairs tested, in %.1f s", len(topology.pairs), time.monotonic() - started)
    return transfers


def _warm_up(topology, limits, form, prefill, decode, local):
    """Compile every program that serving uses, by running it."""
    greedy = sampling.pack(0, 0.0, 0, 1.0)
    starts = range(0, limits.cache_length, limits.buckets[-1])  # where a chunk may begin; where there is one only, none is needed
    reads = sorted({read_length(limits.reads, max(start, 1)) for start in starts}) if len(starts) > 1 else []
    counts = batch_sizes(limits.buckets, limits.batch)
    for bucket in limits.buckets:
        for count in counts[bucket] if prefill else ():
            jax.block_until_ready(prefill.run_prompts([[0]] * count, [greedy] * count, bucket, count, 0, 0))
        for count in counts[bucket] if local else ():
            if bucket * count <= next(b for b in limits.buckets if b >= limits.local_length):
                jax.block_until_ready(local.run_prompts([[0]] * count, [greedy] * count, bucket, count, 0, 0))
        for read in reads if prefill else ():
            jax.block_until_ready(prefill.run([0] * bucket, 0, read, bucket == limits.buckets[0], greedy, 0, 0))
        if decode:
            shapes = form.shape(bucket)
            chunk = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
                            out_shardings=shardings(topology.my_decode.mesh, shapes))()
            decode.write(chunk, 0, 0)
            for length in [b for b, n in counts.items() if b < bucket and bucket // b in n and bucket % b == 0]:
                decode.write(chunk, 0, 0, 0, length)
    if decode:
        decode.activate(chunk["ticket"], 0, 1, 0, [], greedy)
        decode.free(0)
        decode.done()
        for read in limits.reads:
            for steps in {1, limits.steps}:
                jax.block_until_ready(decode.run(read, steps))
