"""Choosing tokens: each request by its own parameters and seed, whatever stands beside it in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg import sampling

V = 32
ROWS = 16  # of a batch of several requests, so that few shapes are compiled
sample = jax.jit(sampling.sample)
OFF = (0, 1.0)  # top_k, top_p


def batch(*requests):
    """A Sampling of requests (seed, temperature, top_k, top_p)."""
    return jax.tree.map(lambda *rows: np.concatenate(rows), *[sampling.pack(*r) for r in requests])


def draw(logits, *requests, position=7):
    """Tokens [B] and scores [B,V] for logits [B,V] or [V], the same position for all; one request alone is a batch of one."""
    n = len(requests)
    rows = 1 if n == 1 else ROWS
    padded = np.zeros((rows, V), np.float32)
    padded[:n] = logits
    tokens, scores = sample(padded, batch(*requests, *[(0, 0.0, *OFF)] * (rows - n)), np.full(rows, position, np.int32))
    return np.asarray(tokens)[:n], np.asarray(scores)[:n]


def some_logits(seed, rows=1, scale=3.0):
    return (np.random.default_rng(seed).normal(size=(rows, V)) * scale).astype(np.float32)


def test_greedy_beside_sampled():
    """A greedy request gets the best token with its logits as scores; a sampled one the same as alone."""
    logits = some_logits(0)[0]
    tokens, scores = draw(logits, (1, 0.0, *OFF), (2, 1.0, *OFF), (3, 0.0, 5, 0.5), (4, 1.5, 3, 0.9))
    np.testing.assert_array_equal(scores[[0, 2]], [logits, logits])
    assert tokens[0] == tokens[2] == logits.argmax()
    for row, request in ((1, (2, 1.0, *OFF)), (3, (4, 1.5, 3, 0.9))):
        np.testing.assert_array_equal(scores[row], draw(logits, request)[1][0])


def test_all_greedy():
    """A batch of greedy requests: the best token of each row, the first one of equals."""
    logits = some_logits(1, rows=3)
    logits[2, [4, 9]] = 50
    tokens, scores = draw(logits, *[(s, 0.0, *OFF) for s in range(3)])
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(scores, logits)


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 7), st.sampled_from([(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8), (0.0, 0, 1.0)]),
       st.lists(st.sampled_from([(0.0, 0, 1.0), (1.0, 2, 1.0), (2.0, 0, 0.1), (0.3, 0, 1.0)]), min_size=7, max_size=7))
def test_same_in_any_batch(seed, row, request, others):
    """Seed and position alone choose: any row of a batch, any neighbours, and alone, with bit-equal scores."""
    logits = some_logits(seed, rows=8)
    requests = [(100 + i, *o) for i, o in enumerate(others)]
    requests.insert(row, (seed, *request))
    tokens, scores = draw(logits, *requests)
    alone = draw(logits[row], (seed, *request))
    assert tokens[row] == alone[0][0]
    np.testing.assert_array_equal(scores[row], alone[1][0])


def test_position_and_seed_both_count():
    """Another position or another seed gives other noise; the same gives the same again."""
    logits = np.zeros(V)
    one = draw(logits, (5, 1.0, *OFF), position=1)[1]
    np.testing.assert_array_equal(one, draw(logits, (5, 1.0, *OFF), position=1)[1])
    assert not np.any(one == draw(logits, (5, 1.0, *OFF), position=2)[1])
    assert not np.any(one == draw(logits, (6, 1.0, *OFF), position=1)[1])


def test_every_bit_of_a_seed_counts():
    """Negative seeds and seeds beyond 32 bits are seeds of their own, modulo 2**64."""
    seeds = [0, 1, -1, 2**32, 2**32 + 1, -2**32, 2**63 - 1, -2**63, 2**31, -2**31]
    scores = draw(np.zeros(V), *[(s, 1.0, *OFF) for s in seeds])[1]
    assert len(np.unique(scores, axis=0)) == len(seeds)
    np.testing.assert_array_equal(draw(np.zeros(V), (-1, 1.0, *OFF))[1], draw(np.zeros(V), (2**64 - 1, 1.0, *OFF))[1])


def test_top_k_of_one_is_greedy():
    """top_k=1 takes the best token at any temperature and seed."""
    logits = some_logits(3, rows=16)
    tokens, _ = draw(logits, *[(s, 0.1 + s / 4, 1, 1.0) for s in range(16)])
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def expected_set(logits, temperature, top_k, top_p):
    """Which tokens stay, in float64: of the top_k best those before whom less than top_p of their probability stands."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")[:top_k or len(logits)]
    p = np.exp(scaled[order] - scaled[order[0]])
    p /= p.sum()
    before = np.cumsum(p) - p
    assert np.all(np.abs(before[1:] - top_p) > 1e-5) or top_p == 1, "too near to the edge for float32"
    return set(order[(before < top_p) | (np.arange(len(order)) == 0)].tolist())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (1, 1.0), (5, 1.0), (V, 1.0), (V + 9, 1.0), (0, 0.9), (0, 0.5), (0, 0.01),
                                          (0, 0.999), (7, 0.8), (3, 0.5), (20, 0.95)])
def test_filters_keep_exactly_the_right_set(temperature, top_k, top_p):
    """As a plain NumPy version does, over several rows."""
    logits = some_logits(11, rows=6, scale=2.0)
    _, scores = draw(logits, *[(s, temperature, top_k, top_p) for s in range(6)])
    for row in range(6):
        kept = set(np.flatnonzero(scores[row] > sampling.FILTERED / 2).tolist())
        assert kept == expected_set(logits[row], temperature, top_k, top_p)


def test_top_p_off_keeps_the_tail():
    """With top_p=1 nothing is filtered, also where the sum rounds to 1 before the tail and a neighbour filters."""
    logits = np.full(V, -25.0)
    logits[3] = 0
    scores = draw(logits, (1, 1.0, 0, 1.0), (2, 1.0, 2, 0.5))[1]
    assert scores[0].min() > -100
    np.testing.assert_array_equal(scores[0], draw(logits, (1, 1.0, 0, 1.0))[1][0])


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-40, 1e-60])
def test_tiny_top_p_is_greedy(top_p):
    """The best token stays even where top_p is 0 in float32."""
    logits = some_logits(4)[0]
    assert draw(logits, (1, 1.0, 0, top_p))[0] == [logits.argmax()]


@pytest.mark.parametrize("filters", [OFF, (4, 1.0), (0, 0.9)])
@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-32, 2e-38, 1e-42, 1e-60])
def test_tiny_temperature_is_greedy(temperature, filters):
    """No NaN and no overflow: the best token, with finite scores, also where all logits are negative."""
    logits = np.linspace(-30, 30, V)[::-1].copy()
    logits[5] = 40
    for shift in (0, -100):
        tokens, scores = draw(logits + shift, (1, temperature, *filters))
        assert np.all(np.isfinite(scores)) and tokens[0] == 5


def test_draws_follow_the_softmax():
    """4096 draws over positions: chi-square of the counts within 5 sigma of its mean, plain, filtered and at a temperature."""
    logits = np.linspace(1.5, -1.5, 16).astype(np.float32)
    n = 4096
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 6, 1.0), (1.0, 0, 0.7)):
        params = jax.tree.map(lambda a: np.repeat(a, n, 0), sampling.pack(123, temperature, top_k, top_p))
        tokens, _ = sample(np.tile(logits, (n, 1)), params, np.arange(n, dtype=np.int32))
        kept = sorted(expected_set(logits, temperature, top_k, top_p))
        p = np.exp(logits[kept] / temperature)
        expected = n * p / p.sum()
        counts = np.bincount(tokens, minlength=16)
        assert counts.sum() == counts[kept].sum() == n
        free = len(kept) - 1
        assert np.sum((counts[kept] - expected) ** 2 / expected) < free + 5 * np.sqrt(2 * free)


def test_neighbouring_seeds_are_independent():
    """One draw of each of 4096 seeds at one position follows the softmax too."""
    logits = np.linspace(1.0, -1.0, 16).astype(np.float32)
    n = 4096
    params = sampling.Sampling(np.stack([np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32)], 1), np.ones(n, np.float32),
                               np.zeros(n, np.int32), np.ones(n, np.float32))
    tokens, _ = sample(np.tile(logits, (n, 1)), params, np.full(n, 3, np.int32))
    expected = n * np.exp(logits) / np.exp(logits).sum()
    assert np.sum((np.bincount(tokens, minlength=16) - expected) ** 2 / expected) < 15 + 5 * np.sqrt(30)


def test_best_candidates():
    """Ids and scores of the n best, the best first; n = 0 gives none."""
    scores = jnp.asarray(some_logits(2, rows=2))
    ids, values = sampling.best(scores, 3)
    order = np.argsort(-np.asarray(scores), -1)[:, :3]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(scores), order, -1))
    assert sampling.best(scores, 0)[0].shape == (2, 0)


def test_empty_slots_choose_the_best():
    """The parameters of unused slots are valid and greedy."""
    logits = some_logits(5, rows=ROWS)
    tokens, _ = sample(logits, sampling.empty(ROWS), np.zeros(ROWS, np.int32))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
