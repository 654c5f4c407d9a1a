"""Callbacks that compress what Hugging Face's Trainer sends, once it has wrapped its model at the start of training."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from qcomp.core.compressor import Compressor
from qcomp.integrations.ddp import HookState, hook
from qcomp.integrations.ddp.parameters import mark_of

__all__ = ["AttachOptimizer", "CompressGradients"]

_FILE = "qcomp_hook.pt"


class CompressGradients(TrainerCallback):
    """Compress the gradients of a Trainer during its backward passes, for any optimizer.

    Each checkpoint gets the state of the hook, in the file ``qcomp_hook.pt``. A resumed run reads it if it was saved
    together with the weights that the run begins with. To resume from a folder outside ``output_dir``, also name the
    folder in ``TrainingArguments(resume_from_checkpoint=...)``. On one process the callback does nothing.

    Parameters
    ----------
    trainer : transformers.Trainer
        A Trainer that wraps its model in DistributedDataParallel, as under torchrun.
    compressor : Compressor
        As for `qcomp.integrations.ddp.hook`, which says what is sent.
    **settings
        Further arguments of `qcomp.integrations.ddp.hook`.

    Warns
    -----
    UserWarning
        If a resumed run finds no state of the hook that belongs to its checkpoint, and so starts with residuals of
        zero.

    Examples
    --------
    >>> trainer = Trainer(model=model, args=args, train_dataset=data)  # doctest: +SKIP
    >>> trainer.add_callback(CompressGradients(trainer, qcomp.QSGD(levels=7)))  # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer, compressor: Compressor, **settings: Any) -> None:
        self._trainer = trainer
        self._compressor = compressor
        self._settings = settings
        self._hook: HookState | None = None
        self._wrapped: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook, and load its state if the run resumes."""
        if args.world_size == 1:
            return
        model: Any = self._trainer.model_wrapped
        if model is not self._wrapped:  # else train() was called before
            self._hook, run = hook(self._compressor, model, **self._settings)
            model.register_comm_hook(self._hook, run)
            self._wrapped = model
        if state.global_step:
            self._load(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the hook's states of all ranks into the new checkpoint."""
        if self._hook is not None:
            self._hook.gather_states()
            if args.process_index == 0:
                saved = {"hook": self._hook.state_dict(), "weights": self._weights()}
                torch.save(saved, _checkpoint(args, state) / _FILE)

    def _load(self, args: TrainingArguments, state: TrainerState) -> None:
        assert self._hook is not None
        given = args.resume_from_checkpoint
        named = [Path(given)] if isinstance(given, str) else []
        folders = [*named, _checkpoint(args, state)]
        files = [file for folder in folders if (file := folder / _FILE).is_file()]
        found = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        weights = self._weights()
        own = [saved["hook"] for saved in found if saved["weights"] == weights][:1]
        # Without a shared disk, all ranks of some nodes may find no file.
        counts = torch.zeros(args.world_size, dtype=torch.int32, device=args.device)
        counts[args.process_index] = len(own)
        torch.distributed.all_reduce(counts)
        if counts.any():
            self._hook.load_state_dict(own if args.process_index == int(counts.argmax()) else [])
            return
        warnings.warn(
            f"no {_FILE} belongs to the checkpoint of step {state.global_step}, so the residuals of the hook start at "
            f"0; expected it in {folders[0]}, or in the folder that TrainingArguments(resume_from_checkpoint=...) "
            "names",
            stacklevel=2,
        )

    def _weights(self) -> list[int]:
        """Return a hash of each trained weight tensor, which shows whether a checkpoint has the same weights."""
        return [mark_of(p.detach()) for p in self._wrapped.parameters() if p.requires_grad]


class AttachOptimizer(TrainerCallback):
    """Let the qcomp optimizer of a Trainer exchange its momenta during the backward passes.

    Outside of a Trainer, the optimizer's argument ``model`` does this. The callback gathers the states of all ranks
    before each checkpoint, so that rank 0's file resumes all of them. So add it after callbacks that request
    checkpoints. On one process it does nothing.

    Parameters
    ----------
    trainer : transformers.Trainer
        A Trainer with an optimizer of `qcomp.torch` and a ``max_grad_norm`` of 0; to clip, pass ``clip_norm`` to the
        optimizer.

    Raises
    ------
    ValueError
        When training begins, if ``max_grad_norm`` is not 0, since averaged momenta cannot be clipped as gradients.
    TypeError
        When training begins, if the optimizer is not one of `qcomp.torch`.

    Examples
    --------
    >>> settings = {"lr": 2e-3, "betas": (0.9, 0.95), "freeze": 300, "clip_norm": 1.0}
    >>> trainer = Trainer(..., optimizer_cls_and_kwargs=(qcomp.torch.OneBitAdam, settings))  # doctest: +SKIP
    >>> trainer.add_callback(AttachOptimizer(trainer))  # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._wrapped: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the wrapped model to the optimizer."""
        if args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm is {args.max_grad_norm}; expected 0, since the optimizer averages momenta instead of "
                f"gradients: pass clip_norm={args.max_grad_norm} to the optimizer"
            )
        optimizer, model = self._optimizer, self._trainer.model_wrapped
        if not hasattr(optimizer, "attach"):
            raise TypeError(
                f"the Trainer's optimizer is a {type(optimizer).__name__}; expected one of qcomp.torch, such as with "
                "optimizer_cls_and_kwargs=(qcomp.torch.OneBitAdam, {...}); for any other optimizer, use "
                "CompressGradients"
            )
        if args.world_size > 1 and model is not self._wrapped:  # else train() was called before
            optimizer.attach(model)
            self._wrapped = model

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gather the states of all ranks if a checkpoint follows, or may follow."""
        if control.should_save or (control.should_evaluate and args.save_strategy == "best"):
            self._optimizer.gather_states()

    on_epoch_end = on_step_end

    @property
    def _optimizer(self) -> Any:
        return getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
