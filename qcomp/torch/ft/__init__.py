"""Training with the quorums of torchft: replicas may die, come back and join, and the others go on.

torchft finds out which replicas are alive. `qcomp.elastic.Elastic` decides from which step these replicas go on, and
what becomes of residuals.
"""

from qcomp.torch.ft.group import ProcessGroup  # isort: skip  (it says what is missing without torchft)
from qcomp.torch.ft.outer import ElasticOuterLoop
from qcomp.torch.ft.steps import Elastic

__all__ = ["Elastic", "ElasticOuterLoop", "ProcessGroup"]
