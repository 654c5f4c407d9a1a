"""The name of the machine, by which ranks find out which of them share a node."""

import os

__all__ = ["host_name"]


def host_name(found: str) -> str:
    """Return the environment variable QCOMP_HOST if it is set, else the name that was found.

    For containers of one machine that have different names, or of different machines that have the same.

    Examples
    --------
    >>> host_name("node17")
    'node17'
    """
    return os.environ.get("QCOMP_HOST") or found
