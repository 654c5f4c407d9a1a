"""What all checks of `qcomp.testing` share: laws that run group by group, and a report of the broken laws."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

Attempt = tuple[str, Callable[[], None]]
"""The name of a law, and a call that raises if it is broken."""


class ContractError(AssertionError):
    """Raised if promises are broken; the message names each of them, with the first case that breaks it."""


@dataclass(frozen=True)
class Contract:
    """The laws about one thing.

    Parameters
    ----------
    subject : str
        What is checked, and on which library.
    groups : sequence of sequences of Attempt
        The laws. Laws of a group rely on the groups before it, and run only if all earlier laws hold.
    before : mapping of str to callable
        Preparations, which run before all laws, by the name of the law that needs them.
    """

    subject: str
    groups: Sequence[Sequence[Attempt]]
    before: Mapping[str, Callable[[], None]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def names(self) -> list[str]:
        """The names of all laws, in order."""
        return [name for group in self.groups for name, _ in group]

    def verdicts(self, *, only: str | None = None) -> Iterator[tuple[str, str | None]]:
        """Run the laws, and yield the name of each with its counterexample, or with None if it holds.

        Ends after the first group with a broken law.

        Parameters
        ----------
        only : str, optional
            The name of the only law to run; by default all are run.
        """
        for name, prepare in self.before.items():
            if only in (None, name):
                prepare()
        for group in self.groups:
            sound = True
            for name, law in group:
                if only not in (None, name):
                    continue
                found = _counterexample(law)
                sound = sound and found is None
                yield name, found
            if not sound:
                return

    def broken(self, *, only: str | None = None) -> Iterator[tuple[str, str]]:
        """Run the laws, and yield the name of each broken law and its counterexample; see `verdicts`."""
        for name, found in self.verdicts(only=only):
            if found is not None:
                yield name, found

    def require(self, *, only: str | None = None) -> None:
        """Raise `ContractError` with the names of the broken laws in the first group in which any law is broken."""
        broken = [f"- {name}: {found}" for name, found in self.broken(only=only)]
        if broken:
            raise ContractError(f"{self.subject} breaks {len(broken)} promise(s):\n" + "\n".join(broken))


def _counterexample(law: Callable[[], None]) -> str | None:
    """Run a law; return its error text if it is broken, else None."""
    try:
        with np.errstate(all="ignore"):  # NumPy warns of overflow before a documented error
            law()
    except Exception as error:
        text = str(error) or type(error).__name__
        return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
    return None
