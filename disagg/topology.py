"""Joining the job, and which process and device belongs to which engine.

An engine is one copy of the model on one mesh over whole processes. `prefill` and `decode` engines are numbered apart;
in interleaved mode every engine is both, so prefill engine i and decode engine i share one mesh.
"""

import contextlib
import ctypes
import dataclasses
import os
import socket
import sys
import threading
import time

import jax
import numpy as np
from absl import logging
from jax._src import distributed
from jax.sharding import Mesh

from disagg import roles

LAST_S = 1.0  # seconds that process 0 leaves the others to end

# glibc's mallopt: buffers below the first of these (the most it takes) come from memory that is kept when freed, all from one
# arena. Else every chunk that arrives gets fresh pages, and the kernel's clearing of them takes longer than the copying.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX = (-3, 32 * 2**20), (-1, 2**31 - 1), (-8, 1)


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine. `processes` are the controllers that own its devices; the first of them is its leader."""

    role: str
    index: int
    mesh: Mesh
    processes: tuple[int, ...]
    slices: tuple[str, ...]

    @property
    def name(self):
        return f"{self.role} {self.index} (slice {', '.join(self.slices)})"

    @property
    def leader(self):
        return self.processes[0]

    @property
    def owners(self):
        """The process of each position of the mesh."""
        return [p for p in self.processes for _ in range(self.mesh.size // len(self.processes))]


@dataclasses.dataclass(frozen=True)
class Topology:
    mode: str
    process: int
    num_processes: int
    prefill: tuple[Engine, ...]
    decode: tuple[Engine, ...]

    @property
    def pairs(self):
        """(prefill index, decode index) pairs between which chunks are transferred, in the order that all processes use."""
        if self.mode == "interleaved":
            return []
        return [(p, d) for p in range(len(self.prefill)) for d in range(len(self.decode))]

    @property
    def my_prefill(self):
        return next((e for e in self.prefill if self.process in e.processes), None)

    @property
    def my_decode(self):
        return next((e for e in self.decode if self.process in e.processes), None)


def start(config, *, coordinator, num_processes, process, cpu_devices):
    """Join the job. Everything is set before a backend exists.

    One process has nothing to join. With coordinator, num_processes and process all None, jax finds them. Raises OSError if process 0
    cannot listen on its port. If a process does not join within config.control.start_s, the others end with an error.
    """
    control = config.control
    jax.config.update("jax_default_matmul_precision", config.matmul_precision)
    # Otherwise JAX's preemption notifier swallows SIGTERM and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    # A dead process fails only what waits for it; the others go on.
    jax.config.update("jax_enable_recoverability", True)
    if cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if num_processes == 1:
        return
    if coordinator is not None and process == 0:
        _check_free(*_split(coordinator), "process 0 cannot listen on coordinator address")
    with _exit_after(control.start_s, f"process {'?' if process is None else process}: not all of the job's "
                     f"{num_processes or ''} processes joined at {coordinator or 'the coordinator'} within "
                     f"config.control.start_s={control.start_s:.0f} s"):
        try:
            jax.distributed.initialize(coordinator, num_processes, process, heartbeat_timeout_seconds=int(control.deadline_s),
                                       initialization_timeout=int(control.start_s) + 60)
        except ValueError:
            if (coordinator, num_processes, process) != (None, None, None):
                raise
            return  # jax has found no cluster: one process alone
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        transfer, state = config.transfer, distributed.global_state
        address = transfer.address or _address_towards(coordinator or state.coordinator_address)
        # An explicit port: with port 0 the sender publishes 0 and the receiver waits for ever.
        port = _hold_port(address, transfer.port + state.process_id if transfer.port else 0)
        jax.config.update("jax_cross_host_transfer_socket_address", f"{address}:{port}")
        jax.config.update("jax_cross_host_transport_addresses", ",".join([f"{address}:0"] * transfer.streams))
        jax.config.update("jax_cross_host_transfer_transfer_size", transfer.slice_bytes)
        if jax.config.jax_platforms == "cpu":
            _keep_memory()
        jax.devices()


def _keep_memory():
    """Where the C library is another one, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX):
            mallopt(option, value)


@contextlib.contextmanager
def _exit_after(seconds, message):
    """End the process with a clear line if the body takes longer: JAX itself aborts it with a stack trace."""
    def give_up():
        logging.error(message)
        logging.flush()
        os._exit(1)
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(code):
    """End this process without waiting for any other: jax's own exit waits also for dead ones.

    The process that holds the coordination service goes a moment after the others have said goodbye: jax aborts those that
    are still there without it.
    """
    with contextlib.suppress(OSError):  # a full disk or a closed pipe has been reported
        sys.stdout.flush()
    sys.stderr.flush()
    if distributed.global_state.service is not None:
        time.sleep(LAST_S)
    os._exit(code)


def coordination_client():
    """The client of the coordination service, which carries the log and the reports. Private in JAX; used only here."""
    return distributed.global_state.client


def free_port(host="127.0.0.1"):
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


_held = []  # sockets that keep ports of this process from being given to another one


def _hold_port(address, port=0):
    """A port, a free one if 0, that nothing else gets while this process lives; JAX's own socket may share it and is its only listener.

    JAX lets its socket share a port with any other: where two processes listen on one, a connection to the one goes to the other,
    and nobody says so. Raises OSError, naming it, if the port is taken, ValueError if there is none of this number.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"config.transfer.port gives this process port {port}, expected one below {2**16}")
    if port:
        _check_free(address, port, "config.transfer.port: transfers cannot be taken on")
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, port))
    _held.append(held)
    return held.getsockname()[1]


def _address_towards(coordinator):
    """This host's address on the way to the coordinator, by which the other hosts reach it, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((coordinator.rpartition(":")[0], 1))  # of a datagram socket: nothing is sent
        return s.getsockname()[0]


def _split(address):
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator address must be ip:port, got {address!r}")
    return host, int(port)


def _check_free(host, port, what):
    """Raise OSError, naming the address, if it is this machine's and its port is taken."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise OSError(e.errno, f"{what} {host}:{port}: {os.strerror(e.errno)}") from None


def slices_of(devices, names=None):
    """Slice name -> its process ids, in order.

    A name given for a process wins; else the device's slice_index where the platform has several slices; else every
    process is a slice of its own. names: process id -> name, for the processes that were given one.
    """
    names = names or {}
    several = len({getattr(d, "slice_index", None) for d in devices}) > 1
    slices = {}
    for d in sorted(devices, key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index)):
        name = names.get(d.process_index) or str(d.slice_index if several else d.process_index)
        members = slices.setdefault(name, [])
        if d.process_index not in members:
            members.append(d.process_index)
    return slices


def build(config, devices, process, names=None):
    """Split `devices` (of all processes) into engines. Raises ValueError, with the numbers, where they do not fit."""
    names_of_roles = roles.of(config)
    slices = slices_of(devices, names)
    slice_of = {p: name for name, members in slices.items() for p in members}
    order = [p for members in slices.values() for p in members]
    by_process = {p: sorted((d for d in devices if d.process_index == p), key=lambda d: d.id) for p in order}
    chosen = {name: _slice_names(config[name].slices, slices, name) for name in names_of_roles}
    named = {s for picked in chosen.values() for s in picked}
    free = [p for p in order if slice_of[p] not in named]
    engines, used = {}, {}
    for name in names_of_roles:
        role = config[name]
        need = role.engines * role.processes
        have = [p for s in chosen[name] for p in slices[s]] if chosen[name] else free[:need]
        if len(have) != need:
            where = f"slices {', '.join(chosen[name])} have" if chosen[name] else "left for it are"
            raise ValueError(f"{name}: {role.engines} engines of {role.processes} processes need {need} processes, "
                             f"{where} {len(have)} of the job's {len(order)}")
        if not chosen[name]:
            free = free[need:]
        for p in have:
            if p in used:
                raise ValueError(f"process {p} (slice {slice_of[p]}) is asked for by both {used[p]} and {name}")
            used[p] = name
        engines[name] = tuple(_engine(name, i, role, have[i * role.processes:(i + 1) * role.processes], by_process, slice_of)
                              for i in range(role.engines))
    if idle := [p for p in order if p not in used]:
        raise ValueError(f"the job has {len(order)} processes, the config uses {len(used)}: no engine has processes {idle}")
    decode = engines["decode"]
    prefill = engines.get("prefill") or tuple(dataclasses.replace(e, role="prefill") for e in decode)
    return Topology(config.mode, process, len(order), prefill, decode)


def _slice_names(wanted, slices, role):
    known = list(slices)
    picked = []
    for s in wanted:
        name = known[s] if isinstance(s, int) and 0 <= s < len(known) else s
        if name not in slices:
            raise ValueError(f"config.{role}.slices names slice {s!r}; the job has {len(known)}: {', '.join(known)}")
        picked.append(name)
    return picked


def _engine(role_name, index, role, processes, by_process, slice_of):
    tp = role.tp or sum(len(by_process[p]) for p in processes)
    each = tp // len(processes)
    chosen = []
    for p in processes:
        if len(by_process[p]) < each or tp % len(processes):
            raise ValueError(f"config.{role_name}.tp={tp} over {len(processes)} processes needs {tp / len(processes):g} devices a process; "
                             f"process {p} has {len(by_process[p])}")
        if len(by_process[p]) > each and by_process[p][0].platform == "tpu":
            raise ValueError(f"config.{role_name}.tp={tp} leaves devices of process {p} unused ({each} of "
                             f"{len(by_process[p])}): on TPU an engine takes whole slices")
        chosen += by_process[p][:each]
    names = tuple(dict.fromkeys(slice_of[p] for p in processes))
    return Engine(role_name, index, Mesh(np.array(chosen), ("tp",)), tuple(processes), names)
