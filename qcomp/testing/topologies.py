"""`check_topology`: checks whether a topology keeps its promises."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from qcomp.core.mean.topologies.base import Topology
from qcomp.core.mean.topologies.registry import register
from qcomp.core.numeric.random import Key
from qcomp.testing.law_groups import Attempt, Contract
from qcomp.testing.libraries import Namespace, library_name, to_library, to_numpy
from qcomp.testing.means import NODES, SPECS, Peers, average, inputs
from qcomp.testing.topology_laws import OF_MANY_RANKS, TOPOLOGY_LAWS

_SHAPES = [(40,), (5,), ()]


def check_topology(topology: Topology, xp: Namespace = np, *, thorough: bool = False) -> None:
    """Check that a topology keeps every promise of `qcomp.CompressedMean`.

    The check runs worlds of one to five ranks, which take turns in one thread, and worlds with shared nodes if the
    topology uses nodes. All ranks request the same exchanges and hold the same means. The sum identity holds, in
    float64 and in float32. Arguments and earlier results are not written to. Each hop has its own draws. A refusal
    reaches all ranks. Damaged messages are noticed. Rounds, coders, donation and communicators do not change results.
    The cost is a sensible number, counts the bytes that ranks send, and has enough seconds on the wire for them.

    Parameters
    ----------
    topology : Topology
        The topology to check. It is registered if it is not registered yet.
    xp : namespace
        An array library, which must give the same bytes as NumPy; the laws themselves run on NumPy.
    thorough : bool
        Whether to check all worlds, up to seven ranks.

    Raises
    ------
    ContractError
        If laws are broken. The error names the broken laws of the first group that has any, and the world.
    TypeError
        If ``topology`` is not an instance of a topology.

    Examples
    --------
    A single law takes less time:

    >>> import qcomp
    >>> contract = qcomp.testing.contract_of(qcomp.topologies.topology("all_gather"))
    >>> contract.require(only="ranks_agree")
    """
    topology_contract(topology, xp, thorough=thorough).require()


def topology_contract(topology: Topology, xp: Namespace = np, *, thorough: bool = False) -> Contract:
    """Return the laws about a topology."""
    register(topology)
    worlds = worlds_of(topology, thorough=thorough)
    many = [Peers(topology.name, tuple(range(size))) for size in (7, 17)]
    groups: list[Sequence[Attempt]] = [
        [
            (law.__name__, partial(_in_each, law, [*worlds, *many] if law in OF_MANY_RANKS else worlds))
            for law in group
        ]
        for group in TOPOLOGY_LAWS
    ]
    if xp is not np:
        on = Peers(topology.name, worlds[-1].nodes)
        groups.append([("same_as_on_numpy", lambda: same_as_on_numpy(on, xp))])
    return Contract(f"the topology {topology.name!r} on {library_name(xp)}", groups)


def worlds_of(topology: Topology, *, thorough: bool) -> list[Peers]:
    """Return worlds of one to five ranks; if the topology uses nodes, also one of `NODES`, or all if thorough."""
    shared = tuple(NODES.values()) if thorough else (NODES["3 and 2"],)
    separate = [Peers(topology.name, tuple(range(n))) for n in range(1, 6)]
    return separate + [Peers(topology.name, nodes) for nodes in shared if topology.wants_nodes]


def _in_each(law: Callable[[Peers], None], worlds: Sequence[Peers]) -> None:
    """Check a law in several worlds, the smallest first; an error names the world."""
    for world in worlds:
        try:
            law(world)
        except Exception as error:
            where = f"{world.size} ranks on nodes {world.nodes}"
            text = str(error) or type(error).__name__
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{kind}{text} ({where})") from error


def same_as_on_numpy(world: Peers, xp: Namespace) -> None:
    """Means and residuals in another library have the same bytes as on NumPy."""
    for spec in SPECS[:2]:
        mean, held = world.mean(spec), []
        for library in (np, xp):
            convert = partial(to_library, library)
            first = [convert(x) for x in inputs(0, 0, shapes=_SHAPES)]
            states, record = world.start(mean, first), []
            for step in range(2):
                values = world.values(step, shapes=_SHAPES)
                values[-1][0][:20] *= np.float32(2.0**-130)  # subnormal, which some devices flush
                arrays = [[convert(x) for x in of_rank] for of_rank in values]
                means, states = average(mean, arrays, states, Key(step=step))
                residuals = [r for state in states for r in (*state.worker, *state.server)]
                record += [to_numpy(x).tobytes() for x in (*means, *residuals)]
            held.append(record)
        assert held[0] == held[1], f"with {spec}, {library_name(xp)} gives other bytes than NumPy"
