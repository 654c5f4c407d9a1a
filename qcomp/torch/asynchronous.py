"""`AsynchronousOuterLoop`: the asynchronous outer loop around any optimizers of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qcomp.core.outer.asynchronous import Asynchronous
from qcomp.core.outer.asynchronous_state import AsynchronousState
from qcomp.core.outer.mailbox import Mailbox
from qcomp.integrations.ddp.parameters import wrapped_in
from qcomp.torch.optimizer import AveragingOptimizer, untraced
from qcomp.torch.outer import LOOPED, StepCalls
from qcomp.torch.parameters import plain_products
from qcomp.torch.trained_parameters import Trained


class AsynchronousOuterLoop:
    """Lets the steps of torch's optimizers be the inner steps of a `qcomp.outer.Asynchronous` loop.

    After each step of the last optimizer it counts an inner step, leaves a contribution in the mailbox if one is due,
    and applies closed rounds to the model. It waits for no other rank, and a rank may join at any time.

    Parameters
    ----------
    model : Module, or iterable of Parameter or of pairs of names and parameters
        What is trained, as for `OuterLoop`, but whole on this rank. Its parameters become the shared parameters.
        Buffers are not exchanged.
    optimizer : torch.optim.Optimizer, or sequence of them
        The inner optimizers, in the order in which they step, as for `OuterLoop`. Their states stay on their ranks.
    loop : qcomp.outer.Asynchronous
        The settings.
    mailbox : qcomp.comm.FolderMailbox
        Where the ranks leave files for each other.

    Attributes
    ----------
    weight : float or None
        Weight of the next inner step, such as its number of tokens; see `qcomp.outer.Asynchronous.step`.

    Raises
    ------
    ValueError
        As for `OuterLoop`; or if the model is wrapped in DistributedDataParallel or sharded, or an optimizer of qcomp
        averages over several ranks: such ranks would apply different rounds in the same step.
    MismatchError
        If the job of the mailbox has other settings or parameters.
    CommunicatorError
        From an optimizer's step, as from `qcomp.outer.Asynchronous.step`.

    Examples
    --------
    >>> import tempfile, torch, qcomp.torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loop = qcomp.outer.Asynchronous(loop=qcomp.outer.diloco(2), quorum=1, grace=0, pause=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mailbox = qcomp.comm.FolderMailbox(folder)
    ...     outer = qcomp.torch.AsynchronousOuterLoop(model, optimizer, loop, mailbox)
    ...     while outer.core_state.version < 3:
    ...         model(torch.ones(1, 4)).sum().backward()
    ...         optimizer.step()
    >>> outer.core_state.step
    6
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loop: Asynchronous,
        mailbox: Mailbox,
    ) -> None:
        if not isinstance(loop, Asynchronous):
            raise TypeError(f"loop is {loop!r}; expected a qcomp.outer.Asynchronous")
        self._trained = Trained(model, optimizer, buffers=False)
        self._loop, self._mailbox = loop, mailbox
        self.weight: float | None = None
        _require_alone(model, self._trained)
        for number, one in enumerate(self._trained.optimizers):
            if one in LOOPED:
                raise ValueError(
                    f"optimizer {number} has an OuterLoop already; expected one loop: call remove() of the other first"
                )
        params, self._state = loop.begin(self._trained.values(), mailbox, self._trained.names)
        self._trained.begin_with(params)
        self._calls = StepCalls()
        self._hooks = [
            hook
            for one in self._trained.optimizers
            for hook in (
                one.register_step_pre_hook(self._before),
                one.register_step_post_hook(self._after),
            )
        ]
        LOOPED.update(self._trained.optimizers)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the copy would take part in the job under the same rank."""
        raise TypeError(
            "an AsynchronousOuterLoop cannot be copied or pickled: a process that starts again makes a new one"
        )

    @property
    def core_state(self) -> AsynchronousState:
        """The state of the core's loop, whose ``version`` counts the rounds that this rank has applied."""
        return self._state

    def remove(self) -> None:
        """Take the hooks off the optimizers, which then train this rank alone."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            LOOPED.difference_update(self._trained.optimizers)

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the shared parameters by name, the same on all ranks after the same number of rounds."""
        trained = self._trained
        return dict(zip(trained.names, self._loop.shared(trained.values(), self._state), strict=True))

    @untraced  # in a compiled step
    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._calls.enter(optimizer) and optimizer is self._trained.optimizers[0]:
            self._trained.begin_step()

    @untraced
    @torch.no_grad()
    def _after(self, optimizer: Any, *_: Any) -> None:
        """Count an inner step; send a contribution after the state holds it, so that no error makes it count twice."""
        if not self._calls.leave(optimizer) or optimizer is not self._trained.optimizers[-1]:
            return
        values = self._trained.values()
        self._trained.look(self._loop.every, exchanges=self._state.sent is not None)
        with plain_products(values[0]):
            self._take(*self._loop.step(values, self._state, self._mailbox, weight=self.weight))
            if self._state.sent is not None and not self._state.sent.is_there:
                self._take(*self._loop.exchange(self._trained.values(), self._state, self._mailbox))

    def _take(self, params: Sequence[torch.Tensor], state: AsynchronousState) -> None:
        self._trained.write(params)
        self._state = state


def _require_alone(model: Any, trained: Trained) -> None:
    """Raise ValueError if several processes train one model together."""
    if wrapped_in(model) is not None:
        raise ValueError(
            "model is wrapped in DistributedDataParallel; expected model.module, trained without the wrapper"
        )
    if hasattr(trained.tensors[0], "device_mesh"):
        raise ValueError("model is sharded; expected the whole model on each rank")
    for number, one in enumerate(trained.optimizers):
        if isinstance(one, AveragingOptimizer) and one.comm.size > 1:
            raise ValueError(
                f"optimizer {number} averages over {one.comm.size} ranks; expected one with "
                "comm=qcomp.comm.LocalCommunicator.alone()"
            )
