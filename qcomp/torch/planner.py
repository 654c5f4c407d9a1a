"""`LoadPlanner`: reads a state that another number of ranks has saved with torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from qcomp.core.checkpoint.gathering import of_rank, rank_of


class LoadPlanner(DefaultLoadPlanner):
    """Planner of ``torch.distributed.checkpoint.load`` for a state that another number of ranks has saved.

    Each rank then reads its share of the states of the old ranks. ``load_state_dict`` of the optimizer distributes them
    among all ranks, so that feedback loses nothing. With the same number of ranks it reads what the default planner
    reads.

    Parameters
    ----------
    *args, **kwargs
        As for ``torch.distributed.checkpoint.DefaultLoadPlanner``.

    Examples
    --------
    >>> import qcomp.torch, tempfile, torch, torch.distributed.checkpoint as dcp, warnings
    >>> model = torch.nn.Linear(128, 128)
    >>> optimizer = qcomp.torch.OneBitAdam(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # torch.distributed is not initialised
    ...     _ = dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    ...     planner = qcomp.torch.LoadPlanner()
    ...     dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, planner=planner)
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Ask for the states of old ranks where the checkpoint has none of this rank."""
        for path, entries in list(_of_ranks(state_dict)):
            _ask(entries, ".".join(path), metadata.state_dict_metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _of_ranks(entries: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the path of each dict that has a rank's key, and the dict."""
    if isinstance(entries, dict):
        if any(rank_of(key) for key in entries):
            yield path, entries
        for key, value in entries.items():
            yield from _of_ranks(value, (*path, str(key)))


def _ask(entries: dict[str, Any], path: str, keys: Any) -> None:
    """Replace this rank's key by the keys of old ranks; drop the other ranks' keys, which ``gather_states`` adds."""
    own, *others = [key for key in entries if rank_of(key)]
    for key in others:
        del entries[key]
    (rank, size), prefix = rank_of(own) or (0, 1), f"{path}." if path else ""
    old = {found for key in keys if key.startswith(prefix) and (found := rank_of(key[len(prefix) :]))}
    if f"{prefix}{own}" in keys or not old:  # the default planner names what is missing
        return
    placeholder = entries.pop(own)
    for other, of in sorted(old):
        if other % size == rank:
            entries[of_rank(other, of)] = placeholder
