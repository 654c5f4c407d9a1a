"""The exception classes, one for each kind of failure."""

__all__ = ["CommunicatorError", "MismatchError", "NonFiniteError", "PayloadError"]


class PayloadError(ValueError):
    """Bytes are not the expected payload: truncated, damaged, or from another compressor."""


class NonFiniteError(ValueError):
    """A value is infinite or NaN, or too large to compress."""


class CommunicatorError(RuntimeError):
    """An exchange failed: a peer is dead, absent, late, or sent something unexpected."""


class MismatchError(CommunicatorError):
    """The ranks were not started alike: they differ in version, compressor, sizes, seed or the like."""
