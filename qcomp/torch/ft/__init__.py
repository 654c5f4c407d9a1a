"""Training that survives replicas, with the quorums of torchft: they die, come back and join, and the others go on.

torchft finds out who is alive, and when; what the replicas then agree on, and what becomes of residuals, is up to
`qcomp.elastic.Elastic`.
"""

from qcomp.torch.ft.group import ProcessGroup  # isort: skip  (it says what is missing without torchft)
from qcomp.torch.ft.outer import ElasticOuterLoop
from qcomp.torch.ft.steps import Elastic

__all__ = ["Elastic", "ElasticOuterLoop", "ProcessGroup"]
