"""`host_name`: the name of this machine, by which ranks find out which of them share a node."""

import os


def host_name(found: str) -> str:
    """Return the environment variable QCOMP_HOST if set, else the detected name.

    Set the variable if containers on one machine have different names, or containers on several machines the same.
    """
    return os.environ.get("QCOMP_HOST") or found
