"""Everything that authors of compressors, topologies, kernels, communicators and optimizers need, in one place.

Each name is defined and documented elsewhere in qcomp. Code that imports only from `qcomp`, `qcomp.extend` and
`qcomp.testing` does not depend on the paths below `qcomp.core`, which may change.

A compressor is a frozen dataclass that subclasses `Compressor`, or `BucketedCompressor` if each bucket has a few scales
and each element a small code. It declares its `Traits` and a `PayloadSpec` of `Field` objects, and draws random numbers
with `draws16` from a `Key`; a payload may send `stream_of` the key, so that `decode` can repeat the draws with
`draws16_again`. `array_namespace` returns an array's library; `bitcast`, `divide`, `sqrt` and the sums return the same
bits in every library. `register_compressor`, or an entry point in the group ``qcomp.compressors``, makes the
compressor's name known.

A topology is a subclass of `Topology`. It turns `Operands` into a `Layout`, and a `Call` into an `Averaged` with the
help of `Codec` and `Verdicts`. `register_topology`, or an entry point in the group ``qcomp.topologies`` that names the
class or an instance, makes the topology's name known.

A kernel set is a `KernelSet` that implements some or all of the kernels. Packages list it in the entry point group
``qcomp.kernels``.

A communicator is an object with the two verbs of `Communicator`. The base class `Verbs` derives both from one exchange,
and `drive` runs `Stages` over a communicator. A framework with its own collectives drives the stages itself: it answers
each `AllToAll` and `AllGather` that ``init_stages`` and ``stages`` of an optimizer or a mean yield.

An optimizer is a frozen dataclass that subclasses `Optimizer`. It declares the valid range of each number in a saved
state with `Number`, see `Optimizer.limits`.

Examples
--------
>>> import numpy as np
>>> from qcomp.extend import AllGather, drive
>>> def largest(x, size):
...     arrived = yield AllGather(np.asarray([x], dtype=np.uint8), (1,) * size)
...     return max(int(each[0]) for each in arrived)
>>> import qcomp
>>> qcomp.comm.run_local(3, lambda comm: drive(largest(comm.rank, comm.size), comm))
[2, 2, 2]
"""

from typing import Any

from qcomp.comm.base import Communicator
from qcomp.comm.buffers import from_host, stage_exchange, to_host
from qcomp.comm.verbs import Completed, Pending, Verbs
from qcomp.core import primitives
from qcomp.core.checkpoint.schema import Number
from qcomp.core.compressor import Compressor
from qcomp.core.compressors.bucketed import BucketedCompressor
from qcomp.core.deprecations import former
from qcomp.core.errors import CommunicatorError, MismatchError, NonFiniteError, PayloadError
from qcomp.core.handshake import handshake, handshake_stages
from qcomp.core.kernels import (
    AdamNumbers,
    Blend,
    Encoded,
    EncodedFrame,
    FreshNumbers,
    KernelSet,
    StepNumbers,
)
from qcomp.core.mean.chunks import Chunk, Segment
from qcomp.core.mean.codec import Codec, Compressed, Verdicts
from qcomp.core.mean.costs import Cluster, Cost, Link, Load
from qcomp.core.mean.framing import Frame
from qcomp.core.mean.layout import Layout, Operands, Residuals
from qcomp.core.mean.nodes import Nodes
from qcomp.core.mean.stages import (
    AllGather,
    AllToAll,
    Exchange,
    Stages,
    Transport,
    announce_lengths,
    drive,
    fuse,
    pipeline,
)
from qcomp.core.mean.topologies.base import Averaged, Call, Into, Topology, assemble, decode_means
from qcomp.core.mean.topologies.registry import names as topology_names
from qcomp.core.mean.topologies.registry import register as register_topology
from qcomp.core.numeric.arrays import (
    Array,
    array_namespace,
    bitcast,
    bytes_of,
    compute_dtype_name,
    concat,
    detached,
    device,
    divide,
    dtype_name,
    flush,
    from_bytes_of,
    from_host_bytes,
    host_bytes,
    is_mutable,
    is_traced,
    require_below,
    sqrt,
    to_compute_dtype,
    truncate_last_bit,
    write_into,
)
from qcomp.core.numeric.bitplanes import pack, unpack
from qcomp.core.numeric.buckets import (
    Block,
    blocks,
    bucket_count,
    join_blocks,
    padded_size,
    validate_bucket_size,
)
from qcomp.core.numeric.random import SHARED_RANK, Key, draws16, draws16_again, replace_draws, stream_of
from qcomp.core.numeric.sums import mean_abs, norm2, rms, sum_of_squares, total, tree_sum
from qcomp.core.optimizers.base import Optimizer
from qcomp.core.optimizers.compression import Average, Means
from qcomp.core.payload import Field, Payload, PayloadSpec
from qcomp.core.registry import compressor_names
from qcomp.core.registry import register as register_compressor
from qcomp.core.state import OptimizerState
from qcomp.core.traits import AnyCompressor, Coder, Traits


def __getattr__(name: str) -> Any:
    """Return what an old name stands for."""
    return former(__name__, name)


__all__ = [
    "SHARED_RANK",
    "AdamNumbers",
    "AllGather",
    "AllToAll",
    "AnyCompressor",
    "Array",
    "Average",
    "Averaged",
    "Blend",
    "Block",
    "BucketedCompressor",
    "Call",
    "Chunk",
    "Cluster",
    "Codec",
    "Coder",
    "Communicator",
    "CommunicatorError",
    "Completed",
    "Compressed",
    "Compressor",
    "Cost",
    "Encoded",
    "EncodedFrame",
    "Exchange",
    "Field",
    "Frame",
    "FreshNumbers",
    "Into",
    "KernelSet",
    "Key",
    "Layout",
    "Link",
    "Load",
    "Means",
    "MismatchError",
    "Nodes",
    "NonFiniteError",
    "Number",
    "Operands",
    "Optimizer",
    "OptimizerState",
    "Payload",
    "PayloadError",
    "PayloadSpec",
    "Pending",
    "Residuals",
    "Segment",
    "Stages",
    "StepNumbers",
    "Topology",
    "Traits",
    "Transport",
    "Verbs",
    "Verdicts",
    "announce_lengths",
    "array_namespace",
    "assemble",
    "bitcast",
    "blocks",
    "bucket_count",
    "bytes_of",
    "compressor_names",
    "compute_dtype_name",
    "concat",
    "decode_means",
    "detached",
    "device",
    "divide",
    "draws16",
    "draws16_again",
    "drive",
    "dtype_name",
    "flush",
    "from_bytes_of",
    "from_host",
    "from_host_bytes",
    "fuse",
    "handshake",
    "handshake_stages",
    "host_bytes",
    "is_mutable",
    "is_traced",
    "join_blocks",
    "mean_abs",
    "norm2",
    "pack",
    "padded_size",
    "pipeline",
    "primitives",
    "register_compressor",
    "register_topology",
    "replace_draws",
    "require_below",
    "rms",
    "sqrt",
    "stage_exchange",
    "stream_of",
    "sum_of_squares",
    "to_compute_dtype",
    "to_host",
    "topology_names",
    "total",
    "tree_sum",
    "truncate_last_bit",
    "unpack",
    "validate_bucket_size",
    "write_into",
]
