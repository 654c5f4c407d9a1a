"""The process group of torchft's managers, which connects the replicas anew in each quorum."""

from __future__ import annotations

from datetime import timedelta

from qcomp.comm.patience import SILENCE
from qcomp.comm.torch_dist import TorchCommunicator

try:
    from torchft import process_group
except ImportError as error:
    raise ImportError("qcomp.torch.ft needs torchft: pip install 'qcomp[ft]'") from error


class ProcessGroup(process_group.ProcessGroup):
    """The process group of a ``torchft.Manager``: it connects the replicas of each quorum by gloo.

    It has no collectives of its own, so ``manager.allreduce`` and torchft's DistributedDataParallel do not work on it.

    Parameters
    ----------
    timeout : float, default 60
        Seconds in which all replicas of a quorum must connect, and the longest time that a replica waits for the others
        in an exchange. If a replica dies while they connect, the others wait that long.
    silence : float, default 20
        Seconds without a sign of life after which a replica counts as lost, as for `qcomp.comm.TorchCommunicator`.

    Attributes
    ----------
    comm : TorchCommunicator or None
        The communicator of the last quorum; None if it could not be made.
    quorum : int
        Number of the last quorum; -1 before the first.
    """

    def __init__(self, *, timeout: float = 60.0, silence: float = SILENCE) -> None:
        for name, value in (("timeout", timeout), ("silence", silence)):
            if not value > 0:
                raise ValueError(f"{name} is {value!r}; expected a positive number of seconds")
        super().__init__(0, 1)
        self._timeout, self._silence = timeout, silence
        self.comm: TorchCommunicator | None = None
        self.quorum = -1

    def configure(  # noqa: PLR0917  (as torchft calls it)
        self,
        store_addr: str,
        replica_id: str,  # noqa: ARG002  (torchft passes it)
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,  # noqa: ARG002
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,  # noqa: ARG002
    ) -> None:
        """Connect the replicas of a quorum; the manager calls it.

        Parameters
        ----------
        store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
            As for every process group of torchft.
        """
        self.abort()
        self.quorum = self.quorum + 1 if quorum_id is None else quorum_id
        if group_world_size not in (None, 1):
            raise ValueError(
                f"the manager has world_size={group_world_size}; expected 1: a replica is one process"
            )
        store = process_group.create_store_client(store_addr, timedelta(seconds=self._timeout))
        self.comm = TorchCommunicator.from_store(
            store, rank=rank, size=world_size, timeout=self._timeout, silence=self._silence
        )

    def abort(self) -> None:
        """Close the connections, so that nobody waits for this replica."""
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.close()

    def shutdown(self) -> None:
        """Close the connections."""
        self.abort()

    def errored(self) -> None:
        """Return None, since each exchange raises its own errors."""

    def size(self) -> int:
        """Return the number of replicas in the quorum."""
        return 0 if self.comm is None else self.comm.size

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the name of this kind of process group."""
        return "qcomp"
