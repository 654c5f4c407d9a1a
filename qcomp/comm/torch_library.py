"""Imports torch and torch.distributed, or raises an error that says how to install them; recognises their errors."""

import contextlib
from collections.abc import Iterator

from qcomp.core.errors import CommunicatorError

try:
    import torch
except ImportError as error:
    raise ImportError(
        "a communicator over torch.distributed needs torch: pip install 'qcomp[torch]'"
    ) from error

import torch.distributed as dist

if not dist.is_available():
    raise ImportError("this build of torch has no torch.distributed")

__all__ = ["dist", "is_of_transport", "torch", "transport_errors"]


def is_of_transport(error: RuntimeError) -> bool:
    """Return whether torch.distributed has raised this error.

    Other errors have the same class. If a data loader's worker dies, torch raises a RuntimeError in a handler of
    signals, which Python calls anywhere in the main thread. So the place decides: torch.distributed raises its errors
    in its own Python code, or directly below qcomp's.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return isinstance(error, dist.DistError) or module.startswith(("torch.distributed", "qcomp.comm"))


@contextlib.contextmanager
def transport_errors(text: str) -> Iterator[None]:
    """Raise errors of torch.distributed in the context as `CommunicatorError`: the text, a colon, and torch's text."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CommunicatorError) or not is_of_transport(error):
            raise
        message = f"{text}: {error}"
        raise CommunicatorError(message) from error
