"""`ByName`: the policy that selects a compressor for each tensor by its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qcomp.core.compressor import Compressor
from qcomp.core.policies.exact_below import Tensor, names_of
from qcomp.core.policies.patterns import require_matches

CompressorPolicy = Callable[[Sequence[Tensor]], Sequence[Compressor | None]]
"""Returns a compressor for every tensor of a model, or None for a tensor that stays exact."""


@dataclass(frozen=True)
class ByName:
    """Selects a compressor for each tensor by its name; the first matching pattern counts.

    Parameters
    ----------
    choices : mapping of str to Compressor or None, or sequence of pairs
        Patterns, with ``*``, ``?`` and ``[...]`` as in file names, each with the compressor of matching tensors; None
        keeps matching tensors exact. Each pattern must match a name, and each name must match a pattern: end with
        ``"*"`` for all others.

    Examples
    --------
    >>> import qcomp
    >>> policy = ByName({"norm*": None, "head.*": qcomp.QSGD(levels=127), "*": qcomp.QSGD(levels=7)})
    >>> tensors = [qcomp.Tensor(name, (64, 64), 4096) for name in ("norm1", "head.weight", "body.weight")]
    >>> [c and c.levels for c in policy(tensors)]
    [None, 127, 7]

    Any function of the tensors is a policy:

    >>> def more_levels_for_matrices(tensors):
    ...     return [qcomp.QSGD(levels=127 if len(t.shape) == 2 else 7) for t in tensors]
    >>> opt = qcomp.QAdam(learning_rate=0.1, compressors=more_levels_for_matrices)
    """

    choices: Mapping[str, Compressor | None] | Sequence[tuple[str, Compressor | None]]

    def __post_init__(self) -> None:
        pairs = tuple(dict(self.choices).items())
        for pattern, compressor in pairs:
            if not isinstance(pattern, str):
                raise TypeError(f"choices has the pattern {pattern!r}; expected a str")
            if compressor is not None and not isinstance(compressor, Compressor):
                raise TypeError(
                    f"choices has {compressor!r} for {pattern!r}; expected a qcomp.Compressor, or None"
                )
        object.__setattr__(self, "choices", pairs)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Compressor | None, ...]:
        """Return the compressor of each tensor, or None."""
        pairs = dict(self.choices).items()
        require_matches("choices", [pattern for pattern, _ in pairs], names_of(tensors))
        chosen = []
        for tensor in tensors:
            matching = [compressor for pattern, compressor in pairs if fnmatchcase(tensor.name, pattern)]
            if not matching:
                raise ValueError(
                    f"choices has no pattern that matches {tensor.name!r}; end with '*' for all other tensors"
                )
            chosen.append(matching[0])
        return tuple(chosen)
