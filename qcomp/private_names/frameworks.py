"""`saves_one_rank`: recognises, by undocumented names, training frameworks that save the state of only one rank."""

import inspect

_SAVERS = {
    ("accelerate.checkpointing", "save_accelerator_state"): "Accelerate",
    ("accelerate.checkpointing", "save_custom_state"): "Accelerate",
    ("transformers.trainer", "_save_optimizer_and_scheduler"): "the Trainer of Hugging Face",
}
"""The functions, by module and name, that ask for states on all ranks, but write the state of only one rank."""


def saves_one_rank() -> str | None:
    """Return the calling framework if it writes the state of only one rank; None for other callers."""
    frame = inspect.currentframe()
    while frame is not None:
        found = _SAVERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if found is not None:
            return found
        frame = frame.f_back
    return None
