"""What can go wrong, one exception class for each kind of trouble."""

__all__ = ["CommunicatorError", "MismatchError", "NonFiniteError", "PayloadError"]


class PayloadError(ValueError):
    """Bytes that are not the payload they should be: truncated, damaged, or of another compressor."""


class NonFiniteError(ValueError):
    """A value is infinite or NaN, or so large that its scale does not fit the wire's format."""


class CommunicatorError(RuntimeError):
    """An exchange did not complete: a peer is dead, absent, late, or sent something else."""


class MismatchError(CommunicatorError):
    """The ranks were not started alike: they differ in version, compressor, sizes, seed or the like."""
