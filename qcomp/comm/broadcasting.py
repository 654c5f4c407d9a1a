"""`broadcast`: copies parameters from one rank to all ranks before training."""

from collections.abc import Sequence
from typing import Any

from qcomp.core.broadcast import broadcast_stages
from qcomp.core.handshake import handshake
from qcomp.core.mean.stages import Transport, drive, require_communicator
from qcomp.core.numeric.arrays import Array, array_namespace, as_list, detached, dtype_name, itemsize


def broadcast(x: Array | Sequence[Array], comm: Transport, *, root: int = 0) -> Any:
    """Return copies of one rank's arrays on all ranks, bit for bit.

    All ranks must start with the same parameters; an optimizer's ``init`` raises if they do not.

    Parameters
    ----------
    x : array or sequence of arrays
        Arrays of any supported library, device and dtype, with the same shapes and dtypes on all ranks; the libraries
        may differ. They are not modified.
    comm : Communicator
        All its ranks must make this call.
    root : int
        The rank whose values all ranks get.

    Returns
    -------
    array or list of arrays
        New arrays, of the libraries and on the devices of ``x``.

    Raises
    ------
    MismatchError
        On every rank, if the ranks differ in shapes, dtypes or the root.
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        If the root is not a rank, or ``x`` is empty.

    Notes
    -----
    The root sends each byte about twice. Every other rank sends 1 / N of the bytes to each of the others.

    Examples
    --------
    >>> import numpy as np, qcomp
    >>> def rank_main(comm):
    ...     params = [np.full(2, float(comm.rank))]
    ...     return qcomp.comm.broadcast(params, comm)
    >>> qcomp.comm.run_local(2, rank_main)
    [[array([0., 0.])], [array([0., 0.])]]
    """
    require_communicator(comm)
    if type(root) is not int or not 0 <= root < comm.size:
        raise ValueError(f"root is {root!r}; expected a rank from 0 to {comm.size - 1}")
    tensors = detached(as_list(x))
    array_namespace(*tensors)  # raises unless all are arrays of one library
    dtypes = [dtype_name(t.dtype) for t in tensors]
    for name in set(dtypes):
        itemsize(name)  # raises for dtypes without portable bytes
    facts = {"root": root, "shapes": [list(t.shape) for t in tensors], "dtypes": dtypes}
    handshake(comm, facts, like=tensors[0])
    copies = drive(broadcast_stages(tensors, root=root, rank=comm.rank, size=comm.size), comm)
    return copies if isinstance(x, list | tuple) else copies[0]
