"""The CUDA stream of an exchange thread, which runs concurrently with the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_cuda: Any = torch.cuda  # its type hints are incomplete


class SideStream:
    """A stream of a device that follows the work queued on another stream; does nothing on a CPU."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None

    def future(self) -> Any:
        """Return a future; waiting for it also waits for this stream."""
        return torch.futures.Future(devices=None if self._stream is None else [self._device])

    def mark(self) -> Any:
        """Return an event at the current end of the current stream."""
        return None if self._stream is None else _cuda.current_stream(self._device).record_event()

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Queue the work in the context on this stream, after a mark."""
        if self._stream is None:
            yield
            return
        with _cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def hand_over(self, tensors: Sequence[Any]) -> None:
        """Let the current stream use tensors of this stream, once all work that is queued on this stream is done."""
        if self._stream is not None:
            current = _cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)
