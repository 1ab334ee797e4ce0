"""The counter of tests/hlo.py on a program small enough to count by hand, and on programs compiled here."""

import jax
import jax.numpy as jnp
import pytest

from tests import hlo

# As XLA for TPU writes it, shortened. T(..)S(1) is on-chip memory.
TEXT = """
HloModule by_hand, is_scheduled=true

%sliced (stack: f32[5,1000], number: s32[]) -> f32[1000] {
  %stack = f32[5,1000]{1,0} parameter(0)
  %number = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,1000]{1,0} dynamic-slice(%stack, %number, %zero), dynamic_slice_sizes={1,1000}
  ROOT %flat = f32[1000]{0} bitcast(%part)
}

%updated (old: bf16[8,100], new: bf16[1,100], number.1: s32[]) -> bf16[8,100] {
  %old = bf16[8,100]{1,0} parameter(0)
  %new = bf16[1,100]{1,0} parameter(1)
  %number.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = bf16[8,100]{1,0} dynamic-update-slice(%old, %new, %number.1, %zero.1)
}

%updated_copy (old.1: bf16[8,100], new.1: bf16[1,100], number.2: s32[]) -> bf16[8,100] {
  %old.1 = bf16[8,100]{1,0} parameter(0)
  %new.1 = bf16[1,100]{1,0} parameter(1)
  %number.2 = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  %other = bf16[8,100]{1,0} negate(%old.1)
  ROOT %put.1 = bf16[8,100]{1,0} dynamic-update-slice(%other, %new.1, %number.2, %zero.2)
}

%body (carry: (s32[], f32[1000], f32[5,1000])) -> (s32[], f32[1000], f32[5,1000]) {
  %carry = (s32[], f32[1000]{0:T(1024)S(1)}, f32[5,1000]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%carry), index=0
  %x = f32[1000]{0:T(1024)S(1)} get-tuple-element(%carry), index=1
  %weights = f32[5,1000]{1,0:T(8,128)} get-tuple-element(%carry), index=2
  %w = f32[1000]{0:T(1024)S(1)} fusion(%weights, %i), kind=kLoop, calls=%sliced
  %sum = f32[1000]{0:T(1024)S(1)} all-reduce(%w), channel_id=1, to_apply=%plus
  %one = s32[]{:T(128)S(6)} constant(1)
  %next = s32[]{:T(128)S(6)} add(%i, %one)
  ROOT %again = (s32[], f32[1000]{0:T(1024)S(1)}, f32[5,1000]{1,0:T(8,128)}) tuple(%next, %sum, %weights)
}

%condition (carry.1: (s32[], f32[1000], f32[5,1000])) -> pred[] {
  %carry.1 = (s32[], f32[1000]{0:T(1024)S(1)}, f32[5,1000]{1,0:T(8,128)}) parameter(0)
  %limit = s32[] constant(5)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

%cheap (y: f32[1000]) -> f32[1000] {
  ROOT %y = f32[1000]{0} parameter(0)
}

%dear (y.1: f32[1000]) -> f32[1000] {
  %y.1 = f32[1000]{0} parameter(0)
  %gathered = f32[4000]{0} all-gather(%y.1), channel_id=2, dimensions={0}
  ROOT %y.2 = f32[1000]{0} slice(%gathered), slice={[0:1000]}
}

ENTRY %main (a: f32[1000], weights.1: f32[5,1000], cache: bf16[8,100], kv: bf16[1,100], which: s32[]) -> bf16[8,100] {
  %a = f32[1000]{0:T(1024)} parameter(0)
  %weights.1 = f32[5,1000]{1,0:T(8,128)} parameter(1)
  %cache = bf16[8,100]{1,0} parameter(2)
  %kv = bf16[1,100]{1,0} parameter(3)
  %which = s32[]{:T(128)S(6)} parameter(4)
  %start = (f32[1000]{0:T(1024)S(1)}, f32[1000]{0:T(1024)}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[1000]{0:T(1024)S(1)} copy-done(%start)
  %first = s32[]{:T(128)S(6)} constant(0)
  %begin = (s32[], f32[1000]{0:T(1024)S(1)}, /*index=2*/f32[5,1000]{1,0:T(8,128)}) tuple(%first, %done, %weights.1)
  %while = (s32[], f32[1000]{0:T(1024)S(1)}, f32[5,1000]{1,0:T(8,128)}) while(%begin), condition=%condition, body=%body
  %choice = f32[1000]{0} conditional(%which, %a, %a), branch_computations={%cheap, %dear}
  %in_place = bf16[8,100]{1,0} fusion(%cache, %kv, %which), kind=kLoop, calls=%updated
  ROOT %not_in_place = bf16[8,100]{1,0} fusion(%in_place, %kv, %which), kind=kLoop, calls=%updated_copy
}
"""


def test_bytes_counted_by_hand():
    prefetch = 4000                          # read only: it goes to on-chip memory
    loop = 5 * 4000                          # one layer's slice a turn; the rest is on chip
    branch = 4000 + 16000 + 4000 + 4000      # the dearer one: gathered and sliced
    in_place = 200 + 200                     # the new row, read and written
    not_in_place = 1600 + 200 + 1600         # all of the old one as well
    assert hlo.Program(TEXT).hbm_bytes() == prefetch + loop + branch + in_place + not_in_place


def test_writes_largest_first():
    writes = [write for write in hlo.Program(TEXT).hbm_writes() if write[0]]
    assert writes == [(16000, "all-gather gathered"), (4000, "slice y.2"), (1600, "fusion not_in_place"),
                      (200, "fusion in_place")]


def test_loops_and_collectives():
    program = hlo.Program(TEXT)
    (trips, body), = program.loops()
    assert trips == 5
    assert program.collectives(body) == {"all-reduce": 1}
    assert program.collectives(program.entry) == {"all-reduce": 1, "all-gather": 1}


def test_a_loop_without_a_clear_trip_count_is_refused():
    text = TEXT.replace("%limit = s32[] constant(5)", "%limit = s32[] negate(%carry.1)")
    with pytest.raises(ValueError, match="how often while runs is not clear"):
        hlo.Program(text).hbm_bytes()


def compiled(f, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return hlo.Program(jax.jit(f, **options).lower(*arguments).compile().as_text())


@pytest.mark.parametrize("layers", [3, 12])
def test_a_compiled_loop_reads_each_layer_once(layers):
    def run(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
    program = compiled(run, (1, 128), (layers, 128, 128))
    weights = layers * 128 * 128 * 4
    # On CPU a layer is first cut out of the stack: read, written and read again.
    assert [trips for trips, _ in program.loops()] == [layers]
    assert weights <= program.hbm_bytes() < 3.2 * weights


@pytest.mark.parametrize("donated", [True, False])
def test_a_compiled_update_copies_unless_donated(donated):
    def update(cache, row):
        return jax.lax.dynamic_update_slice(cache, row, (5, 0))
    program = compiled(update, (1000, 64), (1, 64), donate_argnums=(0,) if donated else ())
    assert program.hbm_writes()[0][0] == (64 if donated else 64000) * 4


def test_compiled_collectives_are_found():
    mesh = jax.make_mesh((4,), ("x",))
    split = jax.NamedSharding(mesh, jax.P(None, "x"))
    program = compiled(lambda x: x.sum(), (4, 4), in_shardings=split, out_shardings=jax.NamedSharding(mesh, jax.P()))
    assert program.collectives(program.entry) == {"all-reduce": 1}
