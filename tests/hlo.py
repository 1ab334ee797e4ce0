"""What a compiled program moves, from its optimised HLO text (`compiled.as_text()`).

Counted as XLA wrote it, never measured: logical bytes, without the padding of tiles. Where in doubt the count is too
high: an operation that is not known here reads its operands and writes its result in full.
"""

import collections
import dataclasses
import functools
import math
import re

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
        "f8e4m3fn": 8, "f8e5m2": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "token": 0}
COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast",
               "ragged-all-to-all"}
MOVES_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
                 "replica-id", "optimization-barrier"}
SAME_VALUES = {"bitcast", "reshape", "copy", "transpose", "convert", "get-tuple-element"}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # -> the operand that holds the new values; operand 0 is updated

_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    size: int       # elements
    bytes: float
    on_chip: bool   # in a memory space other than HBM: S(n) in its layout


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    op: str
    shape: str
    operands: tuple[str, ...]
    argument: str   # the text between the parentheses
    attributes: str

    @functools.cached_property
    def arrays(self):
        """The result's Arrays, more than one if it is a tuple."""
        found = []
        for dtype, dims, layout in _ARRAY.findall(self.shape):
            size = math.prod(int(d) for d in dims.split(",") if d)
            found.append(Array(size, size * BITS[dtype] / 8, "S(" in layout))
        return found

    @property
    def hbm_bytes(self):
        return sum(a.bytes for a in self.arrays if not a.on_chip)

    def called(self, attribute):
        """The computation that an attribute names, as in body=%name."""
        return re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes).group(1)


class Computation(dict):
    """Instruction by name; `root` is its result."""

    root: Instruction

    def users(self, name):
        return [i for i in self.values() if name in i.operands]

    def parameter(self, number):
        return next(i for i in self.values() if i.op == "parameter" and i.argument == str(number))


class Program:
    """One compiled module; its methods count over everything it executes."""

    def __init__(self, text):
        self.computations = {}
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if header := _HEADER.match(line):
                computation = self.computations[header[2]] = Computation()
                if header[1]:
                    self.entry = computation
            elif match := _INSTRUCTION.match(line):
                root, name, shape, op, rest = match.groups()
                end = _closing(rest)
                operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
                computation[name] = Instruction(name, op, shape, operands, rest[:end], rest[end:])
                if root:
                    computation.root = computation[name]

    def hbm_bytes(self):
        """Bytes read from and written to HBM in one run: loops multiplied by their trip counts, of a conditional's
        branches the dearest one, on-chip memory left out. A fusion reads of an operand what it slices out of it, and
        updates one in place where its root is an update of that operand."""
        return self._traffic(self.entry)

    def hbm_writes(self):
        """(bytes, "op name") of every instruction's writes to HBM, largest first, those in loops once.

        This is how a copy shows, under whatever name: something of its size is written.
        """
        writes = [(self._written(c, i), f"{i.op} {i.name}") for c in self._executed(self.entry) for i in c.values()]
        return sorted(writes, reverse=True)

    def loops(self):
        """(trip count, body) of every loop."""
        return [(self._trips(i), self.computations[i.called("body")])
                for c in self._executed(self.entry) for i in c.values() if i.op == "while"]

    def collectives(self, computation):
        """How many of each collective the computation holds, and all that it calls."""
        ops = [i.op.removesuffix("-start") for c in self._executed(computation) for i in c.values()]
        return dict(collections.Counter(op for op in ops if op in COLLECTIVES))

    def _executed(self, computation):
        """The computation and all it calls, without those of fusions, reductions and the like."""
        yield computation
        for i in computation.values():
            for name in self._branches(i):
                yield from self._executed(self.computations[name])

    def _branches(self, i):
        if i.op == "while":
            return [i.called("body")]
        if i.op == "call":
            return [i.called("to_apply")]
        if i.op == "async-start":
            return [i.called("calls")]
        if i.op == "conditional":
            if branches := re.search(r"branch_computations=\{(.*?)\}", i.attributes):
                return re.findall(r"%([\w.\-]+)", branches[1])
            return [i.called("true_computation"), i.called("false_computation")]
        return []

    def _trips(self, loop):
        """Trip count of a loop like lax.scan's: a counter from 0 in steps of 1. Raises ValueError for another one."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called("condition")]
        limits = [condition[o].argument for o in condition.root.operands if condition[o].op == "constant"]
        if condition.root.op != "compare" or "direction=LT" not in condition.root.attributes or len(limits) != 1:
            raise ValueError(f"how often {loop.name} runs is not clear from its condition: {condition.root}")
        return int(limits[0])

    def _traffic(self, computation):
        total = 0
        for i in computation.values():
            inner = [self._traffic(self.computations[name]) for name in self._branches(i)]
            total += max(inner, default=0) * (self._trips(i) if i.op == "while" else 1)
            total += self._read(computation, i) + self._written(computation, i)
        return total

    def _read(self, computation, i):
        if self._free(i):
            return 0
        total = 0
        for number, name in enumerate(i.operands):
            operand = computation[name]
            if i.op == "fusion":
                share = self._used(self.computations[i.called("calls")], number)
            elif i.op == "slice-start":  # the result is (operand, slice, context)
                share = i.arrays[1].size
            elif i.op in SLICES and number == 0:
                share = i.arrays[0].size
            elif i.op in UPDATES and number == 0:
                share = 0
            else:
                share = math.inf
            total += sum(a.bytes * min(1, share / max(a.size, 1)) for a in operand.arrays if not a.on_chip)
        return total

    def _used(self, computation, number):
        """How many elements a fused computation needs of its operand: those it slices out, or all (inf)."""
        def used(name):
            if computation[name] is computation.root:
                return math.inf
            return sum(used_by(user, name) for user in computation.users(name))

        def used_by(user, name):
            places = [place for place, operand in enumerate(user.operands) if operand == name]
            if user.op in SLICES and places == [0]:
                return user.arrays[0].size
            if user.op in UPDATES and places == [0] and self._in_place(computation, user):
                return 0
            inner = self.computations[user.called("calls")] if user.op == "fusion" else {}
            if user.op in SAME_VALUES or inner and all(i.op in SAME_VALUES | {"parameter"} for i in inner.values()):
                return used(user.name)
            if inner:
                return sum(self._used(inner, place) for place in places)
            return math.inf

        return used(computation.parameter(number).name)

    def _in_place(self, computation, update):
        """Whether an update's target is what the fused computation was given, so that it can be updated where it is."""
        target = computation[update.operands[0]]
        while target.op == "bitcast":
            target = computation[target.operands[0]]
        return target.op == "parameter"

    def _written(self, computation, i):
        if self._free(i):
            return 0
        if i.op in ("copy-start", "slice-start"):  # the result of a copy is (target, source, context)
            target = i.arrays[i.op == "slice-start"]
            return 0 if target.on_chip else target.bytes
        if i.op in UPDATES:
            return 0 if i.arrays[0].on_chip else sum(a.bytes for a in computation[i.operands[UPDATES[i.op]]].arrays)
        if i.op != "fusion":
            return i.hbm_bytes
        fused = self.computations[i.called("calls")]
        results = [fused[name] for name in fused.root.operands] if fused.root.op == "tuple" else [fused.root]
        if len(results) != len(i.arrays):
            return i.hbm_bytes
        return sum(self._written_by(fused, result, a) for result, a in zip(results, i.arrays) if not a.on_chip)

    def _written_by(self, fused, result, array):
        while result.op == "bitcast":
            result = fused[result.operands[0]]
        if result.op in UPDATES and self._in_place(fused, result):
            return sum(a.bytes for a in fused[result.operands[UPDATES[result.op]]].arrays)
        return array.bytes

    def _free(self, i):
        return i.op in MOVES_NOTHING or i.op.endswith("-done") or bool(self._branches(i))


def _closing(text):
    """Where the parenthesis closes that was opened before the text."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    raise ValueError(f"no closing parenthesis: {text}")
