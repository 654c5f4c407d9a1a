"""Error feedback: adds what compression lost to the next vector, so that nothing is lost for good."""

from qcomp.core.feedback import compress

__all__ = ["compress"]
