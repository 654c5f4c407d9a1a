"""`world`: selects the communicator of this process by the launcher that started it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qcomp.comm.local import LocalCommunicator
from qcomp.comm.patience import Patience, inherit, patience
from qcomp.comm.verbs import require_rank_of_its_own
from qcomp.core.errors import CommunicatorError
from qcomp.core.reporting import warn_caller

if TYPE_CHECKING:
    from qcomp.comm.mpi import MPICommunicator
    from qcomp.comm.torch_dist import TorchCommunicator

# Variables in which launchers store the number of processes. srun comes last, since it may have started the other
# launchers.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Variables that announce a number of processes without starting them.
_PLANNED_SIZES = ("SLURM_NTASKS", "WORLD_SIZE")


def world(
    *, timeout: float | None = None, silence: float | None = None
) -> LocalCommunicator | MPICommunicator | TorchCommunicator:
    """Return the communicator of all ranks started together with this process.

    It detects the launcher by environment variables: mpirun, mpiexec and srun give the ranks of ``MPI.COMM_WORLD``,
    torchrun gives the ranks of torch.distributed. So does a script without a launcher that has initialised
    torch.distributed itself, as with ``torch.multiprocessing.spawn``. Anything else gives a single rank. The first call
    is collective; later calls return the same communicator, unless they change the arguments.

    Communicators that are made later, including those that optimizers and hooks make, have the same ``timeout`` and
    ``silence`` by default.

    Under torchrun it initialises torch.distributed if necessary, even for one rank. Arrays on GPUs use nccl if every
    rank of this machine can have its own GPU, which becomes the rank's current device. All other arrays use gloo.

    Parameters
    ----------
    timeout : float, optional
        Seconds that a rank waits for the others in an exchange. By default the environment variable QCOMP_TIMEOUT, else
        300.
    silence : float, optional
        Seconds without a sign of life after which a rank counts as lost, that is, stopped or cut off. By default the
        environment variable QCOMP_SILENCE. Without either, a rank whose machine is cut off counts as lost after about
        20 seconds; a process that is silent for as long is only reported.

    Returns
    -------
    MPICommunicator, TorchCommunicator or LocalCommunicator

    Raises
    ------
    ImportError
        If an MPI launcher started this process and mpi4py is missing, or torchrun did and torch is missing.
    CommunicatorError
        If the mpirun that started this process belongs to another MPI library than mpi4py uses, or the other ranks do
        not arrive in time.

    Warns
    -----
    UserWarning
        If the environment announces several processes, as in a Slurm batch job, but no launcher started this one.

    Examples
    --------
    >>> world()
    LocalCommunicator(rank=0, size=1)
    """
    inherit(timeout=timeout, silence=silence)
    return _world(patience(), _initialised_by_script(os.environ))


@functools.cache
def _world(
    waits: Patience, initialised_by_script: bool
) -> LocalCommunicator | MPICommunicator | TorchCommunicator:
    environment = os.environ
    if initialised_by_script or _started_by_torchrun(environment):
        require_rank_of_its_own("world")
        from qcomp.comm.torch_launch import torch_world  # noqa: PLC0415  (imports torch)

        return torch_world(**waits._asdict())
    announced = _mpi_size(environment)
    if announced == 1:
        _warn_if_alone_among_others(environment)
        return LocalCommunicator.alone()

    require_rank_of_its_own("world")
    from qcomp.comm.mpi_library import MPI, require_started  # noqa: PLC0415  (starts MPI)

    require_started()
    from qcomp.comm.mpi import MPICommunicator  # noqa: PLC0415

    found = MPI.COMM_WORLD.Get_size()
    if announced is not None and found == 1:
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise CommunicatorError(
            f"{announced} processes were started together, but mpi4py's MPI library ({library}) sees only "
            "this one: start them with the mpirun of that library"
        )
    return MPICommunicator(MPI.COMM_WORLD, **waits._asdict())


def _initialised_by_script(environment: Mapping[str, str]) -> bool:
    """Return whether torch.distributed has several ranks although no launcher started this process."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or _started_by_torchrun(environment) or _mpi_size(environment) != 1:
        return False
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _started_by_torchrun(environment: Mapping[str, str]) -> bool:
    if "TORCHELASTIC_RUN_ID" in environment:  # even for one rank: the script may need torch.distributed
        return True
    # torchrun may run under srun, while users also set MASTER_ADDR and the like for mpirun.
    several = int(environment.get("WORLD_SIZE", "1")) > 1
    return several and {"RANK", "MASTER_ADDR"} <= environment.keys() and _mpi_size(environment) == 1


def _warn_if_alone_among_others(environment: Mapping[str, str]) -> None:
    if any(variable in environment for variable in _MPI_SIZES):
        return  # the launcher started one process
    for variable in _PLANNED_SIZES:
        planned = environment.get(variable, "1")
        if planned != "1":
            warn_caller(
                f"{variable} is {planned}, but no launcher started this process, so it trains alone: start "
                "the program with srun, mpirun or torchrun"
            )


def _mpi_size(environment: Mapping[str, str]) -> int | None:
    """Return how many processes an MPI launcher started; None if unknown."""
    for variable in _MPI_SIZES:
        if variable in environment:
            return int(environment[variable])
    return None if "PMIX_RANK" in environment else 1
