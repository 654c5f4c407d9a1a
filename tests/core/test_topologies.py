"""Every topology keeps the laws of `qcomp.testing` in worlds of every kind; and tests beyond these laws.

Tests specific to one topology, such as the order of its sums, its exchanges and bytes, are in a module of its own.
"""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import qcomp
from qcomp import CompressedMean, Key
from qcomp.comm import run_local
from qcomp.core.mean.topologies.registry import names, topology
from qcomp.core.numeric.random import replace_draws
from qcomp.core.reporting import name_ranks
from qcomp.testing import read_only_numpy
from qcomp.testing.failure_laws import CODED, refusals
from qcomp.testing.means import SHAPES, inputs
from qcomp.testing.topologies import same_as_on_numpy, worlds_of
from qcomp.testing.topology_laws import TOPOLOGY_LAWS, distance_of_an_unbiased_mean
from tests.core.tree import Tree
from tests.core.worlds import (
    SPECS,
    Peers,
    average,
    bits,
    forget_residuals,
    held_by,
    refused,
    require_sum_identity,
    start,
)

pytestmark = pytest.mark.usefixtures("tree")

OWN = names()
TOPOLOGIES = [*OWN, Tree.name]
WORLDS = [
    world
    for name in TOPOLOGIES
    for world in worlds_of(topology(name) if name in OWN else Tree(), thorough=True)
]


def _over(worlds: Sequence[Peers]) -> pytest.MarkDecorator:
    """Return worlds of one rank, of three, and nodes of three and two ranks; `make test-all` adds the other worlds."""
    marks = [
        [] if len(w.nodes) in (1, 3) or w.nodes == (0, 0, 0, 1, 1) else [pytest.mark.exhaustive]
        for w in worlds
    ]
    params = [pytest.param(w, marks=m, id=str(w)) for w, m in zip(worlds, marks, strict=True)]
    return pytest.mark.parametrize("world", params)


every_world = _over(WORLDS)
compressing_world = _over([w for w in WORLDS if w.topology not in OWN or not w.is_exact])
THREE = [Peers(name, (0, 0, 1) if name == "hierarchical" else (0, 1, 2)) for name in TOPOLOGIES]
one_world = pytest.mark.parametrize("world", THREE, ids=str)
"""Three ranks in every topology."""


@pytest.mark.quick_cases(2)
@every_world
@pytest.mark.parametrize(
    "law", [law for group in TOPOLOGY_LAWS for law in group], ids=lambda law: law.__name__
)
def test_keeps_the_law(world, law):
    law(world)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", [w for w in THREE if w.topology in OWN], ids=str)
@pytest.mark.parametrize("library", ["read-only NumPy", "array_api_compat.torch", "array_api_strict"])
def test_every_library_gives_the_same(world, library):
    """The read-only detector also proves that inputs are not written to."""
    same_as_on_numpy(world, read_only_numpy if library == "read-only NumPy" else import_module(library))


def steps_with(kernels: str, mean: CompressedMean, world: Peers, shapes: Any) -> list[bytes]:
    """Return the means of two steps, and the residuals of every rank after them."""
    states = start(mean, inputs(0, 0, shapes=shapes), world.nodes)
    found = []
    with qcomp.backends.use(kernels):
        for step in range(2):
            values = world.values(step, shapes=shapes)
            means, states = average(mean, values, states, Key(step=step))
            found.append(bits(means))
    return found + [held_by(state) for state in states]


@pytest.mark.quick_cases(2)
@every_world
@pytest.mark.parametrize("spec", ["sign:bucket_size=64", "qsgd:levels=7,bucket_size=64"])
def test_kernels_change_nothing(world, spec):
    """Also if fewer buckets than ranks leave a rank with empty chunks."""
    for shapes in ([(900,), (0,), (3, 70), ()], [(70,), (0,)], [(0,)]):
        mean = world.mean(spec)
        pure, numba = (steps_with(kernels, mean, world, shapes) for kernels in ("pure", "numba"))
        assert numba == pure, f"tensors of shapes {shapes}"


@one_world
def test_residuals_that_are_dropped_anywhere_are_caught(monkeypatch, world):
    with monkeypatch.context() as patched:
        hops = forget_residuals(patched, lambda _: False)
        require_sum_identity(world.mean(), world.nodes, shapes=SHAPES)
    assert hops
    for hop in hops:
        with monkeypatch.context() as patched:
            forget_residuals(patched, lambda key, hop=hop: key.hop == hop)
            with pytest.raises(AssertionError):
                require_sum_identity(world.mean(), world.nodes, shapes=SHAPES)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("other", TOPOLOGIES)
def test_a_state_of_another_topology_is_an_error(name, other):
    if name == other or "hierarchical" in (name, other):  # with one rank it is exact
        return
    x, c = np.ones(40, dtype=np.float32), qcomp.ScaledSign(16)
    state = CompressedMean(c, other).zeros([x], rank=0, size=1)
    with pytest.raises(ValueError, match=f"state has topology '{other}'; this mean has '{name}'"):
        CompressedMean(c, name)(x, state, qcomp.comm.LocalCommunicator.alone())


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_with_different_topologies_are_an_error(name):
    other = TOPOLOGIES[TOPOLOGIES.index(name) - 1]

    def rank_main(comm):
        chosen = name if comm.rank else other
        with pytest.raises(qcomp.MismatchError, match=f"'{other}' on rank 0, but '{name}' on rank 1"):
            CompressedMean(qcomp.ScaledSign(), chosen).init(np.zeros(4), comm)
        return True

    assert run_local(2, rank_main, timeout=20) == [True] * 2


# --- which rank is to blame ------------------------------------------------------------------------------------------


def require_named(error: Exception, ranks: list[int], name: str) -> None:
    """Raise AssertionError unless an error names exactly these ranks; one of a third-party topology may name none."""
    if name not in OWN:
        assert "is not finite" in str(error)
        return
    found = re.fullmatch(
        r"a value on ranks? ([\d, and]+) is not finite, or too large to compress", str(error)
    )
    named = [int(rank) for rank in re.findall(r"\d+", found[1])] if found else []
    assert named == ranks, f"{error}: expected to name {name_ranks(ranks)}"


@pytest.mark.quick_cases(2)
@every_world
@pytest.mark.parametrize("spec", [*SPECS, CODED], ids=str)
def test_a_refusal_names_its_rank(world, spec):
    """The text is the same on all ranks; the refusing rank adds the reason."""
    for bad, errors in refusals(world, spec):
        for error in errors:
            require_named(error, [bad], world.topology)
        assert [error.__cause__ is not None for error in errors] == [rank == bad for rank in world.ranks]


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("world", [world for world in WORLDS if world.size > 3], ids=str)
@pytest.mark.parametrize("at", [(0, 5), (5, 5), (169, 169)])
def test_all_ranks_to_blame_are_named(world, at):
    """For ranks with errors in different chunks, and in the same one."""
    values = world.values(0)
    values[1][3][at[0]], values[3][3][at[1]] = np.nan, -np.inf
    mean = world.mean()
    for error in refused(mean, values, start(mean, values[0], world.nodes)):
        require_named(error, [1, 3], world.topology)


@compressing_world
def test_a_mean_that_always_rounds_up_shows(world):
    with replace_draws(lambda key, block: 0):
        assert distance_of_an_unbiased_mean(world) > 12
