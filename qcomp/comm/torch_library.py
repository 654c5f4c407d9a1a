"""Imports torch and torch.distributed, or raises an error that says how to install them."""

try:
    import torch
except ImportError as error:
    raise ImportError(
        "a communicator over torch.distributed needs torch: pip install 'qcomp[torch]'"
    ) from error

import torch.distributed as dist

if not dist.is_available():
    raise ImportError("this build of torch has no torch.distributed")

__all__ = ["dist", "torch"]
