"""The name of the machine, by which ranks find out which of them share a node."""

import os


def host_name(found: str) -> str:
    """Return the environment variable QCOMP_HOST if set, else the detected name.

    Set it for containers on one machine with different names, or on different machines with equal names.
    """
    return os.environ.get("QCOMP_HOST") or found
