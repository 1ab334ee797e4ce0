"""Which process and device belongs to which engine."""

import dataclasses
import socket

import pytest

from configs import tiny
from disagg import roles, topology


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    id: int
    slice_index: int | None = None
    platform: str = "cpu"


def devices(processes, each=1, processes_of_slice=None, platform="cpu"):
    """Devices of this many processes; processes_of_slice: how many processes make a slice, None without slices."""
    return [Device(p, p * each + i, p // processes_of_slice if processes_of_slice else None, platform)
            for p in range(processes) for i in range(each)]


def config(**fields):
    """The tiny config with dotted fields set: prefill__engines=2."""
    c = tiny.get_config()
    for name, value in fields.items():
        *path, last = name.split("__")
        node = c
        for part in path:
            node = node[part]
        node[last] = value
    return c


def layout(topo, role):
    """Processes of each engine of a role."""
    return [e.processes for e in getattr(topo, role)]


def test_a_slice_is_a_process_where_the_platform_has_none():
    """Without slice_index, or with one for all, every process is a slice named by its number."""
    assert topology.slices_of(devices(3, 2)) == {"0": [0], "1": [1], "2": [2]}
    assert topology.slices_of(devices(2, 2, processes_of_slice=2)) == {"0": [0], "1": [1]}


def test_slices_are_in_the_order_of_slice_index():
    """Whatever the order of the devices, and where process ids do not follow the slices."""
    of_slice = {0: 1, 1: 0, 2: 1, 3: 0}
    mixed = [Device(p, 2 * p + i, s) for i in (1, 0) for p, s in reversed(of_slice.items())]
    assert list(topology.slices_of(mixed).items()) == [("0", [1, 3]), ("1", [0, 2])]


def test_given_names_win():
    """Processes of one name are one slice, whatever the platform says."""
    assert topology.slices_of(devices(4), {0: "big", 1: "big", 2: "small"}) == {"big": [0, 1], "small": [2], "3": [3]}


def test_engines_take_processes_in_order_prefill_first():
    """Two prefill engines of one process and two decode engines of two."""
    topo = topology.build(config(prefill__engines=2, decode__engines=2, decode__processes=2), devices(6, 2), 4)
    assert layout(topo, "prefill") == [(0,), (1,)]
    assert layout(topo, "decode") == [(2, 3), (4, 5)]
    assert [d.id for d in topo.decode[1].mesh.devices.flat] == [8, 9, 10, 11]
    assert topo.decode[1].leader == 4 and topo.my_decode is topo.decode[1] and topo.my_prefill is None
    assert topo.pairs == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_tp_takes_the_first_devices_of_each_process():
    """tp is the mesh's size, evenly over the engine's processes; on CPU devices may stay unused."""
    topo = topology.build(config(prefill__tp=1, decode__processes=2, decode__tp=2), devices(3, 2), 0)
    assert [d.id for d in topo.prefill[0].mesh.devices.flat] == [0]
    assert [d.id for d in topo.decode[0].mesh.devices.flat] == [2, 4]


@pytest.mark.parametrize("prefill, decode", [((1,), (0,)), (("1",), ("0",)), ((1,), ()), ((), (0,))])
def test_slices_by_index_and_by_name(prefill, decode):
    """A role gets the slices it names; a role that names none gets those left."""
    topo = topology.build(config(prefill__slices=prefill, decode__slices=decode, prefill__processes=2, decode__processes=2),
                          devices(4, 1, processes_of_slice=2), 0)
    assert (layout(topo, "prefill"), layout(topo, "decode")) == ([(2, 3)], [(0, 1)])
    assert (topo.prefill[0].slices, topo.decode[0].slices) == (("1",), ("0",))
    assert topo.prefill[0].name == "prefill 0 (slice 1)"


def test_slices_by_given_name():
    """Names given for processes can be used in the config."""
    topo = topology.build(config(prefill__slices=("fast",), decode__slices=("large",)), devices(2), 0, {0: "large", 1: "fast"})
    assert (layout(topo, "prefill"), layout(topo, "decode")) == ([(1,)], [(0,)])


def test_interleaved_engines_are_both():
    """One mesh for both roles, no pairs, and the prefill role's settings do not count."""
    topo = topology.build(config(mode="interleaved", decode__engines=2, prefill__engines=5), devices(2, 2), 1)
    assert layout(topo, "prefill") == layout(topo, "decode") == [(0,), (1,)]
    assert topo.my_prefill.mesh is topo.my_decode.mesh and topo.pairs == []
    assert (topo.my_prefill.role, topo.my_decode.role) == ("prefill", "decode")


@pytest.mark.parametrize("fields, have, message", [
    (dict(mode="both"), devices(2), "disaggregated, interleaved, got 'both'"),
    (dict(prefill__engines=0), devices(2), "config.prefill.engines must be at least 1, got 0"),
    (dict(decode__processes=-1), devices(2), "config.decode.processes must be at least 1, got -1"),
    (dict(decode__tp=3, decode__processes=2), devices(3, 2), r"config.decode.tp \(3\) .* config.decode.processes \(2\)"),
    (dict(decode__tp=0), devices(2), r"config.decode.tp \(0\)"),
    (dict(decode__tp=4), devices(2, 2), "decode.tp=4 .* needs 4 devices a process; process 1 has 2"),
    (dict(), devices(1), "decode: 1 engines of 1 processes need 1 processes, left for it are 0 of the job's 1"),
    (dict(prefill__engines=3), devices(3), "decode: .* left for it are 0 of the job's 3"),
    (dict(), devices(4), r"has 4 processes, the config uses 2: .* \[2, 3\]"),
    (dict(prefill__slices=(7,)), devices(2), "prefill.slices names slice 7; the job has 2: 0, 1"),
    (dict(prefill__slices=("x",)), devices(2), "prefill.slices names slice 'x'; the job has 2: 0, 1"),
    (dict(prefill__slices=(-1,)), devices(2), "prefill.slices names slice -1"),
    (dict(prefill__slices=(0,), decode__slices=(0,)), devices(2), r"process 0 \(slice 0\) is asked for by both prefill and decode"),
    (dict(prefill__slices=(0, 1)), devices(3), "prefill: .* need 1 processes, slices 0, 1 have 2 of the job's 3"),
    (dict(decode__tp=1), devices(2, 2, platform="tpu"), r"decode.tp=1 leaves devices of process 1 unused \(1 of 2\)"),
    (dict(decode__processes=2), [*devices(2), Device(2, 2), Device(2, 3)],
     "decode.tp=3 over 2 processes needs 1.5 devices a process"),
])
def test_settings_that_do_not_fit(fields, have, message):
    """Each is refused with the field and the numbers."""
    with pytest.raises(ValueError, match=message):
        topology.build(config(**fields), have, 0)


def listening(address, port):
    """A socket as JAX makes them: it shares its port with any other that allows it, too."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind((address, port))
    s.listen()
    return s


def test_a_held_port_has_one_listener():
    """Nothing else gets the port by asking for a free one, and every connection reaches the socket that JAX opens on it."""
    port = topology._hold_port("127.0.0.1")
    with pytest.raises(OSError), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    with listening("127.0.0.1", port) as server:
        for i in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
                end, _ = server.accept()
                with end:
                    s.sendall(bytes([i]))
                    assert end.recv(1) == bytes([i])


def test_a_port_that_is_taken():
    """Also one that its listener would share."""
    with listening("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"config.transfer.port: transfers cannot be taken on 127.0.0.1:{port}: Address already in use"):
            topology._hold_port("127.0.0.1", port)
    assert topology._hold_port("127.0.0.1", port) == port
    with pytest.raises(ValueError, match="port 70000, expected one below 65536"):
        topology._hold_port("127.0.0.1", 70000)


@pytest.mark.parametrize("fields, expected", [
    (dict(), (2, 1)),
    (dict(prefill__engines=2, decode__engines=3), (5, 1)),
    (dict(prefill__tp=2, decode__tp=4, decode__processes=2), (3, 2)),
    (dict(mode="interleaved", decode__engines=2, decode__tp=4, prefill__engines=9), (2, 4)),
])
def test_local_processes(fields, expected):
    """As many processes and devices as build needs on one machine."""
    c = config(**fields)
    processes, each = roles.local_processes(c)
    assert (processes, each) == expected
    topology.build(c, devices(processes, each), 0)
