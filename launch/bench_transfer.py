"""The transfer benchmark (see launch.bench): started without arguments it runs itself as the processes of one job a layout."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import socket
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import common
from disagg import chunk as chunks
from disagg import selftest, topology
from disagg.decode import DecodeEngine
from disagg.transfer import Transfers
from launch import bench_engine, supervise
from models import llama

SIZES = tuple(2**n for n in range(16, 31, 2))  # 64 KiB to 1 GiB
MESSAGE = 2**20    # bytes of one call of the raw TCP stream
DEADLINE_S = 120.0
BYSTANDER = 2**20  # bytes of the transfers in which it takes no part
CALLS = 50         # of them, one measurement of it
PROMPT, CHUNK = 2048, 512        # SmolLM2's tokens that move while another engine decodes
SLOTS, CACHE, STEPS = 8, 256, 20  # of that engine; steps without a transfer

# A Llama whose chunk of one position is 16 KiB.
MODEL = llama.Llama(llama.Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_layers=32, num_heads=4, num_kv_heads=4,
                                 head_dim=16, max_length=2**17))
POSITION = 2**14


@dataclasses.dataclass(frozen=True)
class Layout:
    """processes and tp (devices) of each of the two engines; bystanders: prefill engines that send nothing. measure: "sizes",
    "bystander" or "decode"."""

    prefill: tuple[int, int]
    decode: tuple[int, int]
    bystanders: int = 0
    measure: str = "sizes"

    @property
    def processes(self):
        return (1 + self.bystanders) * self.prefill[0] + self.decode[0]

    @property
    def params(self):
        """The devices of each side, by process."""
        shown = lambda side: "+".join([str(side[1] // side[0])] * side[0])
        return {"from": shown(self.prefill), "to": shown(self.decode)}

    @property
    def alike(self):
        """One process a side with as many devices: what the peers over a joined mesh are written for."""
        return self.prefill == self.decode and self.prefill[0] == 1


LAYOUTS = (Layout((1, 1), (1, 1)), Layout((1, 2), (1, 2)), Layout((1, 1), (1, 2)), Layout((1, 2), (1, 1)),
           Layout((2, 2), (2, 2)))
WATCHED = Layout((1, 1), (1, 1), bystanders=1, measure="bystander")
DECODING = Layout((1, 1), (1, 1), measure="decode")


def run(repeats, sizes):
    """-> arguments of results.record for each figure, as they are there. Raises ValueError for a size that is not a multiple
    of 32 KiB."""
    for size in sizes:
        if size <= 0 or size % (2 * POSITION):
            raise ValueError(f"--sizes must be multiples of {2 * POSITION} bytes, got {size}")
    return _measure(repeats, sizes)


def _measure(repeats, sizes):
    for layout in LAYOUTS:
        figures = _start(layout, repeats, sizes)
        for size in sizes:
            params, of_size = {"bytes": size} | layout.params, figures[str(size)]
            rates = lambda name: [size / s / 1e9 for s in of_size[name]]
            for peer in [name for name in of_size if name not in ("plain", "checked")]:
                yield "transfer", params, "GB/s", rates("plain"), peer, rates(peer)
            yield "transfer_latency", params, "ms", [1e3 * s for s in of_size["plain"]], None, None
            yield "transfer_checked", params, "GB/s", rates("checked"), "unchecked", rates("plain")
    spent = _start(WATCHED, repeats, ())
    yield "bystander", {"bytes": BYSTANDER} | WATCHED.params, "us", [1e6 * s for s in spent], None, None
    meanwhile = _start(DECODING, repeats, ())
    longer, cpu = ([1e3 * s for s in meanwhile[name]] for name in ("longer", "cpu"))
    yield "decode_meanwhile", {"bytes": meanwhile["bytes"], "batch": SLOTS}, "ms longer", longer, "cpu_ms_of_moving", cpu


def plot(records, file):
    """Draw GB/s over bytes, beside the peers and over the layouts, as an image in the format of the file's name."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (peers, layouts) = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    lines = {}
    for r in records:
        if r["name"] != "transfer":
            continue
        way = f"{r['params']['from']} to {r['params']['to']}"
        lines.setdefault((layouts, way), {})[r["params"]["bytes"]] = r["value"]
        if way == "1 to 1":
            lines.setdefault((peers, "device_put"), {})[r["params"]["bytes"]] = r["value"]
            lines.setdefault((peers, r["peer"]), {})[r["params"]["bytes"]] = r["peer_value"]
    for (axes, label), line in lines.items():
        axes.plot(line.keys(), line.values(), marker="o", label=label)
    for axes, title in ((peers, "one device to one, beside the alternatives"), (layouts, "over meshes (devices of each process)")):
        axes.set(title=title, xlabel="bytes", ylabel="GB/s", xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)


def _start(layout, repeats, sizes):
    port = topology.free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        job = json.dumps(dataclasses.asdict(layout) | {"port": port, "repeats": repeats, "sizes": sizes, "out": str(out)})
        commands = [[sys.executable, "-m", "launch.bench_transfer", job, str(i)] for i in range(layout.processes)]
        if code := supervise.run(commands, env=os.environ | {"JAX_PLATFORMS": "cpu"}):
            raise SystemExit(code)
        return json.loads(out.read_text())


class _Bench:
    """One process of a job. Every measurement begins at a barrier; its seconds are from the moment at which the source
    begins to send until the last process has what it waits for, by the clock that the processes of a machine share."""

    def __init__(self, layout, model, process, client, topo, config):
        self._layout, self._process, self._client, self._topology = layout, process, client, topo
        self._sends = process in topo.prefill[0].processes
        self._receives = process in topo.decode[0].processes
        self._engines = topo.prefill[0], topo.decode[0]
        forms = {name: chunks.Format(model, max(e.mesh.size for e in self._engines), config.transfer.piece_bytes, checked)
                 for name, checked in (("plain", False), ("checked", True))}
        self._transfers = {name: Transfers(form, topo) for name, form in forms.items()}
        self._numbers = 0
        if layout.alike:
            self._joined = Mesh(np.array([e.mesh.devices.flat for e in self._engines]), ("side", "tp"))
            self._sum = jax.jit(lambda tree: jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), tree),
                                out_shardings=NamedSharding(self._joined, PartitionSpec(None, None, "tp")))

    def together(self, work):
        """work() on every process at once, None where there is nothing to do; -> seconds, on every process."""
        self._numbers += 1
        key = f"figures/{self._numbers}"
        self._client.wait_at_barrier(f"{key}/begin", 60_000)
        if work:
            started = time.monotonic()
            work()
            self._client.key_value_set(f"{key}/{self._process}", json.dumps([self._sends, started, time.monotonic()]))
        self._client.wait_at_barrier(f"{key}/end", 60_000)
        given = [json.loads(value) for _, value in self._client.key_value_dir_get(f"{key}/")]
        return max(end for *_, end in given) - min(start for sends, start, _ in given if sends)

    def _size(self, size, repeats):
        """{what: seconds of each repeat}, the first, untimed, left out."""
        bucket = size // POSITION
        form = self._transfers["plain"].form
        works, sent = {}, {}
        for name, transfers in self._transfers.items():
            sent[name] = self._chunk(transfers.form, bucket)
            works[name] = functools.partial(self._transfer, transfers, bucket, sent[name])
        shapes, chunk = form.shape(bucket), sent["plain"]
        with contextlib.ExitStack() as stack:
            if self._layout.alike:
                works |= {"sum": self._summed(shapes, chunk), "host": self._through_host(shapes, chunk)}
            works |= {"tcp": stack.enter_context(self._stream(size)), "memcpy": self._copied(size)}
            seconds = {name: [] for name in works}
            for repeat in range(repeats + 1):
                for name, work in works.items():
                    took = self.together(work)
                    if repeat:
                        seconds[name].append(took)
        return seconds

    def _chunk(self, form, bucket):
        """On the prefill mesh; None where this process has none of it."""
        if not self._sends:
            return None
        fill = lambda: form.sealed(jax.tree.map(lambda s: selftest.pattern(s, jnp.uint32(1)), chunks.unsealed(form.shape(bucket))))
        return jax.block_until_ready(jax.jit(fill, out_shardings=chunks.shardings(self._engines[0].mesh, form.shape(bucket)))())

    def _transfer(self, transfers, bucket, chunk):
        self._numbers += 1
        parts = transfers.issue(self._numbers, 0, 0, bucket, chunk)
        if parts is not None:
            jax.block_until_ready(parts)
            if wrong := transfers.wrong_sums(parts):
                raise RuntimeError(f"what arrived is not what was sent: {wrong}")

    def sizes(self, repeats, sizes):
        return {size: self._size(size, repeats) for size in sizes}

    def decode(self, repeats, _):
        """{"longer": seconds that decode steps take more while a prompt's chunks arrive, "cpu": CPU seconds of both processes
        for moving as much while nothing else runs, "bytes"}."""
        transfers, count = self._transfers["plain"], PROMPT // CHUNK
        chunk = self._chunk(transfers.form, CHUNK)
        engine = self._receives and self._full_engine()

        def send():
            return [parts for n in range(count) if (parts := transfers.issue(n, 0, 0, CHUNK, chunk))]

        def step():
            started = time.perf_counter()
            jax.block_until_ready(engine.run(CACHE, 1))
            return time.perf_counter() - started

        longer, cpu = [], []
        for repeat in range(repeats + 1):
            begun = time.process_time()
            self.together(lambda: jax.block_until_ready(send()))
            self.together(lambda: None)  # the sender has sent all, too
            cpu.append(self._total(time.process_time() - begun))
            usual = statistics.median(step() for _ in range(STEPS)) if engine else 0.0
            extra = 0.0

            def both():
                nonlocal extra
                moving = jax.tree.leaves(send())
                while moving and not all(x.is_ready() for x in moving):
                    extra += step() - usual
            self.together(both)
            longer.append(self._total(extra))
        return {"longer": longer[1:], "cpu": cpu[1:], "bytes": count * transfers.form.bytes(CHUNK)}

    def _full_engine(self):
        """A decode engine of SmolLM2 whose slots go on for as long as is needed."""
        model, params = bench_engine.random_smollm2()
        engine = DecodeEngine(model, params, self._engines[1].mesh, slots=SLOTS, cache_length=CACHE, top=0)
        ticket = jnp.zeros(3, jnp.int32)
        for slot in range(SLOTS):
            engine.activate(ticket, slot, CACHE // 2, 2**30, [], bench_engine.GREEDY)
        return engine

    def _total(self, seconds):
        """The sum of what every process gives, on all of them."""
        self._numbers += 1
        key = f"total/{self._numbers}"
        self._client.key_value_set(f"{key}/{self._process}", str(seconds))
        self._client.wait_at_barrier(f"{key}/end", 60_000)
        return sum(float(value) for _, value in self._client.key_value_dir_get(f"{key}/"))

    def bystander(self, repeats, _):
        """Seconds a call that the process which takes no part spends, while chunks go past it."""
        bucket = BYSTANDER // POSITION
        transfers = self._transfers["checked"]
        chunk = self._chunk(transfers.form, bucket)
        watches, spent = not (self._sends or self._receives), []

        def some():
            for _ in range(CALLS):
                started = time.perf_counter()
                self._transfer(transfers, bucket, chunk)
                spent.append(time.perf_counter() - started)
        for _ in range(repeats + 1):
            self.together(some)
        if watches:
            medians = [statistics.median(spent[i * CALLS:(i + 1) * CALLS]) for i in range(1, repeats + 1)]
            self._client.key_value_set("bystander", json.dumps(medians))
        return json.loads(self._client.blocking_key_value_get("bystander", 60_000))

    # What it is compared with.

    def _summed(self, shapes, chunk):
        """The chunk as one half of an array over both meshes, zeros as the other, added over the sides by one program."""
        layout = NamedSharding(self._joined, PartitionSpec("side", None, "tp"))
        mine = list(self._engines[0 if self._sends else 1].mesh.devices.flat)

        def half(s, x):
            rows = s.shape[1] // len(mine)
            zeros = lambda d: jax.device_put(jnp.zeros((1, s.shape[0], rows, *s.shape[2:]), s.dtype), d)
            data = [p.data[None] for p in x.addressable_shards] if x is not None else [zeros(d) for d in mine]
            return jax.make_array_from_single_device_arrays((2, *s.shape), layout, data, dtype=s.dtype)
        shapes = {name: s for name, s in shapes.items() if name != "ticket"}
        whole = {name: jax.tree.map(lambda s, *x: half(s, *x or (None,)), s, *([chunk[name]] if chunk else [])) for name, s in shapes.items()}
        return lambda: jax.block_until_ready(self._sum(whole))

    def _through_host(self, shapes, chunk):
        """To NumPy, from there to NumPy on every process, and onto the devices of the decode mesh."""
        layout = chunks.shardings(self._engines[1].mesh, shapes) if self._receives else None
        empty = None if self._sends else jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)

        def work():
            got = multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, chunk) if self._sends else empty, self._sends)
            if self._receives:
                jax.block_until_ready({name: jax.device_put(x, layout[name]) for name, x in got.items()})
        return work

    @contextlib.contextmanager
    def _stream(self, size):
        """One TCP connection from the first sender to the first receiver, with buffers that are there already."""
        self._numbers += 1
        key, buffer = f"stream/{self._numbers}", memoryview(bytearray(size))
        if self._process == self._engines[1].leader:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._client.key_value_set(key, str(server.getsockname()[1]))
                end, _ = server.accept()
        elif self._process == self._engines[0].leader:
            end = socket.create_connection(("127.0.0.1", int(self._client.blocking_key_value_get(key, 60_000))))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            yield None
            return

        def work():
            done = 0
            while done < size:
                part = buffer[done:done + MESSAGE]
                done += end.sendall(part) or len(part) if self._sends else end.recv_into(part)
        with end:
            yield work

    def _copied(self, size):
        """One copy in the memory of the source's first process."""
        if self._process != self._engines[0].leader:
            return None
        source, target = np.ones((2, size), np.uint8)
        return lambda: np.copyto(target, source)


def _worker(job, process):
    layout = Layout(tuple(job["prefill"]), tuple(job["decode"]), job["bystanders"], job["measure"])
    config = common.get_config()
    config.prefill.engines = 1 + layout.bystanders
    for role, (processes, tp) in ((config.prefill, layout.prefill), (config.decode, layout.decode)):
        role.processes, role.tp = processes, tp
    each = max(tp // processes for processes, tp in (layout.prefill, layout.decode))
    topology.start(config, coordinator=f"127.0.0.1:{job['port']}", num_processes=layout.processes, process=process, cpu_devices=each)
    client = topology.coordination_client()
    model = bench_engine.random_smollm2()[0] if layout.measure == "decode" else MODEL
    bench = _Bench(layout, model, process, client, topology.build(config, jax.devices(), process), config)
    figures = getattr(bench, layout.measure)(job["repeats"], job["sizes"])
    if process == 0:
        pathlib.Path(job["out"]).write_text(json.dumps(figures))


if __name__ == "__main__":
    logging.set_verbosity(logging.ERROR)
    _worker(json.loads(sys.argv[1]), int(sys.argv[2]))
    topology.leave(0)
