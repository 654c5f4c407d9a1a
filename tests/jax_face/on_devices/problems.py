"""Problems and helpers for the tests on eight devices."""

import jax
import numpy as np
from jax.sharding import PartitionSpec

import qcomp

ALL, DATA = PartitionSpec(), PartitionSpec("data")
BUCKET = 16
SIGN = qcomp.ScaledSign(bucket_size=BUCKET)
SHAPES = {"deep": [(40, 3)], "wide": (7, 9)}
"""Tensors with tails; the number of their buckets is not divisible by the number of devices."""


def mesh_of(n):
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("data",))


def tree_of(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=is_shape)


def stacked(n, seed, shapes=SHAPES):
    """Stack the trees of n devices into one, whose arrays have a first axis of length n."""
    return jax.tree.map(lambda *x: np.stack(x), *(tree_of((seed, rank), shapes) for rank in range(n)))


def own(tree):
    return jax.tree.map(lambda x: x[0], tree)


def rows(tree):
    return jax.tree.map(lambda x: x[None], tree)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def quadratics(n, shapes=SHAPES):
    """Return the curvatures and minima of each device: its gradient at x is curvature * (x - minimum)."""
    curvatures = jax.tree.map(lambda x: np.abs(x) + np.float32(0.5), stacked(n, 1, shapes))
    return curvatures, stacked(n, 2, shapes)


def gradient(params, curvatures, minima):
    return jax.tree.map(lambda x, c, m: c * (x - m), params, curvatures, minima)
