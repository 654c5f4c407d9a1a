"""Error feedback: adds to the next vector what compression lost, so that nothing is lost for good."""

from qcomp.core.feedback import compress

__all__ = ["compress"]
