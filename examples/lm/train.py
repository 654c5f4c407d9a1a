"""The training loop: every rank has the same model and optimizer, and its own batches."""

import hashlib
import os
import socket
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import qcomp
from qcomp.cli.corpus import Corpus, training_batch, validation_windows
from qcomp.comm import Communicator

from .checkpoint import CheckpointError, Checkpoints
from .gather import gather
from .interrupt import StopRequest
from .model import LanguageModel
from .recipes import RECIPES, Settings, make_optimizer

__all__ = ["CONTEXT", "History", "Run", "share_the_cores", "train"]

CONTEXT = 128
LAYERS = 2
VALIDATION_WINDOWS = 128
VALIDATION_BATCH = 16
VALIDATIONS = 6
"""Number of times that the validation loss is measured during a run, including its end."""

DIAGNOSED_EVERY = 10
"""Steps between reports of `qcomp.Diagnostics`."""
COMPARED_EVERY = 50
"""Steps between comparisons of the ranks' parameters."""


@dataclass
class History:
    """What happened at each step; part of every checkpoint."""

    losses: list[float] = field(default_factory=list)
    """Training loss of each step, the mean of all ranks."""
    bytes_sent: list[int] = field(default_factory=list)
    """Bytes sent in each optimizer step by the rank that sent most, without the bytes of the reports."""
    warmup_steps: int = 0
    """Steps before the first one that sent a compressed momentum or gradient."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(completed steps, validation loss)"""
    diagnostics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(completed steps, report)"""
    seconds: float = 0.0
    """Seconds in training steps, without validation."""


@dataclass(frozen=True)
class Run:
    """The results of a finished run, equal on all ranks except for the seconds."""

    settings: Settings
    ranks: int
    parameters: int
    exact_elements: int
    """Elements of the tensors that are never compressed."""
    history: History
    parameters_sha256: str


class Trainer:
    """One run in progress on one rank."""

    def __init__(self, settings: Settings, corpus: Corpus, comm: Communicator) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.comm = comm
        self.corpus = corpus
        self.validation = torch.from_numpy(validation_windows(corpus.validation, VALIDATION_WINDOWS, CONTEXT))
        self.model = LanguageModel(layers=LAYERS, context=CONTEXT)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.parameters = [parameter.detach() for parameter in self.model.parameters()]
        self.optimizer = make_optimizer(settings)
        self.watched = qcomp.Diagnostics(self.optimizer, replicas_every=COMPARED_EVERY)
        self.state = self.optimizer.init(self.parameters, comm, names=self.names)
        self.history = History()

    @property
    def completed(self) -> int:
        """Number of completed steps."""
        return len(self.history.losses)

    def step(self) -> float:
        """Make one step, and return this rank's training loss before the step."""
        start = time.perf_counter()
        self.history.warmup_steps += self.state.stage == "warmup"
        key = (self.settings.seed, self.comm.rank, self.completed)
        windows = training_batch(self.corpus.train, self.settings.batch, CONTEXT, key)
        loss = self.model.loss(torch.from_numpy(windows))
        gradients = list(torch.autograd.grad(loss, list(self.model.parameters())))
        # Every step is diagnosed, since the direction covers several consecutive steps; only some reports are kept.
        parameters, self.state, report = self.watched.step(self.parameters, gradients, self.state, self.comm)
        self.history.bytes_sent.append(round(report["bytes_sent"]))  # without the report's own bytes
        if self.completed % DIAGNOSED_EVERY == 0:
            self.history.diagnostics.append((self.completed + 1, report))
        self.put(parameters)
        self.history.seconds += time.perf_counter() - start
        return loss.item()

    def put(self, parameters: list[torch.Tensor]) -> None:
        """Copy new values into the model's parameters."""
        for own, new in zip(self.parameters, parameters, strict=True):
            own.copy_(new)

    def validate(self) -> float:
        """Measure the mean loss over the validation windows; each rank evaluates a share of the batches.

        Batches are never split, and losses are added in the same order for any number of ranks.
        """
        batches = torch.split(self.validation, VALIDATION_BATCH)
        losses = np.zeros(len(batches))
        with torch.inference_mode():
            for index in range(self.comm.rank, len(batches), self.comm.size):
                losses[index] = self.model.loss(batches[index]).item()
        return float(gather(self.comm, losses).sum(axis=0).mean())

    def checkpoint(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume from here."""
        return {
            "settings": asdict(self.settings),
            "parameters": self.parameters,
            "optimizer": self.optimizer.state_dict(self.state),
            "history": asdict(self.history),
        }

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Raises
        ------
        CheckpointError
            If it was written under other settings, which the message names.
        """
        settings = asdict(self.settings)
        differing = [
            f"{name}: {checkpoint['settings'].get(name)}, now {value}"
            for name, value in settings.items()
            if checkpoint["settings"].get(name) != value
        ]
        if differing:
            raise CheckpointError(f"the checkpoint was written under other settings ({'; '.join(differing)})")
        self.put(checkpoint["parameters"])
        self.state = self.optimizer.load_state_dict(
            checkpoint["optimizer"], self.parameters, self.comm, names=self.names
        )
        self.history = History(**checkpoint["history"])

    def digest(self) -> str:
        """Return the SHA-256 of all parameters, after checking that it is the same on all ranks."""
        data = b"".join(parameter.numpy().tobytes() for parameter in self.parameters)
        digest = hashlib.sha256(data).digest()
        if any(bytes(other) != digest for other in gather(self.comm, np.frombuffer(digest, np.uint8))):
            raise RuntimeError("the ranks ended with different parameters")
        return digest.hex()

    def finished(self) -> Run:
        """Return the result, with the bytes of the rank that sent the most."""
        sent = gather(self.comm, np.array(self.history.bytes_sent))
        busiest = sent[sent.sum(axis=1).argmax()].tolist()
        return Run(
            settings=self.settings,
            ranks=self.comm.size,
            parameters=sum(parameter.numel() for parameter in self.parameters),
            exact_elements=sum(
                parameter.numel()
                for parameter, exact in zip(self.parameters, self.state.exact, strict=True)
                if exact
            ),
            history=replace(self.history, bytes_sent=busiest),
            parameters_sha256=self.digest(),
        )


def train(
    settings: Settings,
    corpus: Corpus,
    comm: Communicator,
    stop: StopRequest,
    *,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 50,
    resume: bool = False,
    stop_after: int | None = None,
) -> Run | None:
    """Train to the end of the settings' steps, with a progress bar on rank 0.

    Parameters
    ----------
    settings, corpus, comm
        The training job, its data, and the ranks.
    stop
        Checked after every step: if any rank was asked to stop, all leave together.
    checkpoints
        Where to write checkpoints: every ``checkpoint_every`` steps, at the end, and before leaving early.
    resume
        Whether to continue from the last of the ``checkpoints``, if any.
    stop_after
        Leave after this many steps, as if asked to stop.

    Returns
    -------
    Run or None
        None, on all ranks, if they left early.

    Raises
    ------
    CheckpointError
        If there are checkpoints of another job, or of this one without ``resume``.
    """
    trainer = Trainer(settings, corpus, comm)
    if checkpoints and (last := checkpoints.last_step()) is not None:
        if not resume:
            raise CheckpointError(f"{checkpoints.folder} holds checkpoints: --resume, or another folder?")
        trainer.resume(checkpoints.load(last))
    validate_at = {round(settings.steps * part / VALIDATIONS) for part in range(1, VALIDATIONS + 1)}
    with tqdm(
        total=settings.steps,
        initial=trainer.completed,
        desc=f"{RECIPES[settings.optimizer].label:<15}",
        unit="step",
        ncols=96,
        mininterval=0.5,
        disable=comm.rank != 0,
    ) as bar:
        while trainer.completed < settings.steps:
            loss, asked = agree(comm, trainer.step(), stop.made or trainer.completed + 1 == stop_after)
            trainer.history.losses.append(loss)
            completed = trainer.completed
            if completed in validate_at:
                trainer.history.validation.append((completed, trainer.validate()))
            asked = asked and completed < settings.steps
            if checkpoints and (asked or completed % checkpoint_every == 0 or completed == settings.steps):
                checkpoints.save(completed, trainer.checkpoint())
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
            if asked:
                return None
    return trainer.finished()


def agree(comm: Communicator, loss: float, stop: bool) -> tuple[float, bool]:
    """Return the mean of all ranks' losses, and whether any of them was asked to stop."""
    losses, stops = gather(comm, np.array([loss, stop])).T
    return float(losses.mean()), bool(stops.any())


def share_the_cores(comm: Communicator) -> None:
    """Limit torch on this rank to its share of the machine's cores."""
    own = np.array([zlib.crc32(socket.gethostname().encode())])
    here = int((gather(comm, own) == own).sum())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // here))
