"""Going on from saved states: this rank's own, or those of another number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qcomp.core.checkpoint.reshard import World, regroup
from qcomp.core.handshake import handshake
from qcomp.core.mean.stages import Transport, drive
from qcomp.core.state import OptimizerState

__all__ = ["resume"]


def resume(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    world: World,
    comm: Transport,
    load: Callable[[Mapping[str, Any]], OptimizerState],
) -> OptimizerState:
    """Return the state to go on from, see `Optimizer.load_state_dict`; ``load`` makes it from a dict of this rank."""
    what = "a dict" if isinstance(saved, Mapping) else "a sequence of dicts"
    handshake(comm, {"saved": what}, like=world.like)
    own = saved if isinstance(saved, Mapping) else drive(regroup(saved, world), comm)
    loaded, problem = None, None
    try:
        loaded = load(own)
    except Exception as error:
        problem = error  # perhaps of this rank alone: tell all, so that no rank waits
    verdict = f"of step {loaded.step}, {loaded.stage}, {loaded.exchange.topology}" if loaded else "refused"
    try:
        handshake(comm, {"checkpoint": verdict}, like=world.like)
    finally:
        if problem:  # says more than that the ranks differ
            raise problem
    assert loaded is not None
    return loaded
