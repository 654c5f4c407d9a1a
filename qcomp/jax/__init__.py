"""qcomp for JAX: pytrees of parameters, over a communicator or inside `jax.jit` over an axis of a mesh.

- `PytreeOptimizer`, `PytreeMean` and `PytreeOuterLoop` run over any communicator of `qcomp.comm`, such as MPI.
- `qcomp.jax.optax.compressed`, `MeshMean` and `MeshOuterLoop` run inside `jax.shard_map`, with collectives of XLA.

`qcomp.jax.optax` needs optax: ``pip install 'qcomp[jax]'``.
"""

from qcomp.jax.mesh import MeshMean
from qcomp.jax.mesh_outer import MeshOuterLoop, MeshOuterState
from qcomp.jax.mesh_state import MeshState, Residuals, partition_specs
from qcomp.jax.outer import PytreeOuterLoop
from qcomp.jax.trees import PytreeMean, PytreeMeanState, PytreeOptimizer, names_of

__all__ = [
    "MeshMean",
    "MeshOuterLoop",
    "MeshOuterState",
    "MeshState",
    "PytreeMean",
    "PytreeMeanState",
    "PytreeOptimizer",
    "PytreeOuterLoop",
    "Residuals",
    "names_of",
    "partition_specs",
]
