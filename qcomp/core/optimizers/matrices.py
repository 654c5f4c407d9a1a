"""Decides from shapes, names and Muon's settings which matrices each tensor holds, if any."""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from qcomp.core.policies.exact_below import Tensor
from qcomp.core.policies.patterns import require_matches
from qcomp.core.reporting import warn_caller

Parts = int | tuple[int, ...]
"""The parts of a matrix along its outputs: the number of equal parts, or the size of each part."""
Splits = tuple[tuple[str, Parts], ...]
"""Patterns of names, each with the parts of the matrices whose names match."""

_KERNEL = 16
"""The longest axis that is taken for a kernel axis of a convolution; a stack of matrices rarely has shorter rows."""
_OUTSIDE = re.compile(r"embed|(^|[./])(emb|wte|wpe|(lm_)?head|classifier)([./]|$)", re.IGNORECASE)
"""Names of embeddings and output heads in the models of most libraries."""
_FUSED = re.compile(
    r"qkv|query_key_value|gate_up|c_attn|weight_(ih|hh)|(^|[._/])(in_proj|((to_|w)?kv(_proj)?|w1[23])([._/]|$))",
    re.IGNORECASE,
)
"""Names of tensors that hold several matrices: queries, keys and values, gates and inputs, the gates of an LSTM."""
_FOUND = {0: "in torch", -1: "in Flax"}
"""For each value of ``output_axis``, a library whose layers have their outputs on this axis."""


class Form(NamedTuple):
    """How a tensor is cut into matrices."""

    output_axis: int
    """The axis of the outputs in a matrix, or in each slice of a stack: 0 or -1."""
    stacked: bool = False
    """Whether each slice along the first axis is a matrix of its own."""
    parts: Parts = 1
    """The parts of each matrix along its outputs."""
    told: bool = False
    """Whether users have given the parts, whatever the tensor's shape and name suggest."""
    told_whole: bool = False
    """Whether users have said of this very tensor that it is one matrix, even if it looks depthwise."""

    def slice_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a slice, or of the tensor if it is no stack."""
        return shape[1:] if self.stacked else shape

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the number of slices, and the rows and columns of each; a row has the weights of one output."""
        rows = self.slice_of(shape)[self.output_axis]
        slices = shape[0] if self.stacked else 1
        return slices, rows, math.prod(shape) // (slices * rows)

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each part of a slice."""
        return (rows // self.parts,) * self.parts if isinstance(self.parts, int) else self.parts

    def kernel(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes that are neither outputs nor inputs."""
        return self.slice_of(shape)[2:] if self.output_axis == 0 else self.slice_of(shape)[:-2]

    def suits(self, shape: tuple[int, ...]) -> bool:
        """Return whether Muon suits a tensor; it does not suit vectors, stacks of vectors and depthwise kernels."""
        return self.may_suit(shape) and (self.told_whole or not self.looks_depthwise(shape))

    def may_suit(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor holds matrices or depthwise kernels."""
        if len(self.slice_of(shape)) < 2 or 0 in shape:
            return False
        _, rows, columns = self.sides(shape)
        return min(rows, columns) > 1

    def looks_depthwise(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor may hold the kernels of a depthwise convolution, or of any with one input channel."""
        inputs = self.slice_of(shape)[1 if self.output_axis == 0 else -2]
        return inputs == 1 and max(self.kernel(shape), default=math.inf) <= _KERNEL

    def cuts_inputs(self, shape: tuple[int, ...]) -> bool:
        """Return whether the parts seem to be queries, keys and values that lie along the axis of the inputs."""
        _, rows, columns = self.sides(shape)
        thirds = isinstance(self.parts, int) and self.parts % 3 == 0
        return thirds and columns == 3 * rows and not self.kernel(shape)


def as_splits(splits: Any) -> Splits:
    """Return the setting ``splits`` as pairs; raise TypeError or ValueError if it is malformed."""
    expected = "expected a mapping of patterns to a number of parts or their sizes, such as {'*qkv*': 3}"
    if isinstance(splits, Mapping):
        splits = tuple(splits.items())
    if not isinstance(splits, tuple | list):
        raise TypeError(f"splits is {splits!r}; {expected}")
    found = []
    for entry in splits:
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise TypeError(f"splits has {entry!r}; {expected}")
        pattern, parts = entry
        numbers = parts if isinstance(parts, tuple | list) else [parts]
        if not numbers or any(type(n) is not int or n < 1 for n in numbers):
            raise ValueError(f"splits has {parts!r} for {pattern!r}; expected integers, at least 1")
        found.append((pattern, parts if isinstance(parts, int) else tuple(parts)))
    return tuple(found)


@lru_cache(64)  # the same in every step
def forms_of(
    names: tuple[str, ...], output_axis: int, stacks: tuple[str, ...], splits: Splits
) -> tuple[Form, ...]:
    """Return the form of each tensor, by its name; the first pattern of ``splits`` that matches counts."""
    forms = []
    for name in names:
        parts = next((parts for pattern, parts in splits if fnmatchcase(name, pattern)), None)
        stacked = any(fnmatchcase(name, pattern) for pattern in stacks)
        # A pattern such as "*" may not mean depthwise kernels.
        told_whole = parts == 1 and (name, 1) in splits
        forms.append(Form(output_axis, stacked, 1 if parts is None else parts, parts is not None, told_whole))
    return tuple(forms)


@lru_cache(4096)
def blocks_of(form: Form, shape: tuple[int, ...], most: int | None) -> tuple[tuple[int, int, int], ...]:
    """Cut a tensor into blocks of at most ``most`` rows; return runs of equal blocks.

    A run is its first row, its number of blocks, and the rows per block. The rows of all slices are numbered
    consecutively, and no block crosses the boundary of a part.

    Examples
    --------
    >>> blocks_of(Form(0), (10, 5), 4)
    ((0, 2, 4), (8, 1, 2))
    >>> blocks_of(Form(0, stacked=True, parts=2), (3, 8, 5), None)
    ((0, 6, 4),)
    """
    slices, rows, _ = form.sides(shape)
    blocks: list[int] = []
    for size in form.sizes(rows) * slices:
        at_once = min(size, most or size)
        whole, rest = divmod(size, at_once)
        blocks += [at_once] * whole + [rest] * (rest > 0)
    runs, first = [], 0
    for of_block, run in groupby(blocks):
        number = len(list(run))
        runs.append((first, number, of_block))
        first += number * of_block
    return tuple(runs)


def require_forms(
    matrices: Sequence[Tensor], forms: Sequence[Form], stacks: Sequence[str], splits: Splits
) -> None:
    """Raise ValueError unless each pattern matches a matrix, and the parts of each matrix fit its outputs."""
    names, what = [t.name for t in matrices], "tensor that Muon orthogonalises"
    require_matches("stacks", stacks, names, what)
    require_matches("splits", [pattern for pattern, _ in splits], names, what)
    for tensor, form in zip(matrices, forms, strict=True):
        _, rows, _ = form.sides(tensor.shape)
        if sum(form.sizes(rows)) != rows:
            where = f"{'each slice of ' * form.stacked}{tensor.name!r} of shape {tensor.shape}"
            raise ValueError(
                f"splits has {form.parts} for {where}, with {rows} outputs on axis {form.output_axis}; expected a "
                f"number of parts that divides {rows}, or sizes that add up to it"
            )


def warn_of_doubts(matrices: Sequence[Tensor], forms: Sequence[Form], *, guess_outside: bool) -> None:
    """Warn of tensors whose shapes or names suggest no matrix, or several matrices, unless a setting explains them."""
    pairs = list(zip(matrices, forms, strict=True))
    unexplained = [(t, form) for t, form in pairs if not form.told]
    axis = forms[0].output_axis if forms else 0
    other = -1 if axis == 0 else 0
    kernels = [
        (t, form.slice_of(t.shape), form.kernel(t.shape)) for t, form in unexplained if form.kernel(t.shape)
    ]
    flat = [t for t, shape, _ in kernels if shape[axis] < shape[other]]
    if flat:
        warn_caller(
            f"output_axis is {axis}, so Muon orthogonalises few rows of {_shown(flat)}: if the outputs are on the "
            f"other axis, as {_FOUND[other]}, pass output_axis={other}; if the tensor is a stack of matrices, name it "
            f"in stacks; if it is one matrix as it is, pass splits={{{flat[0].name!r}: 1}}"
        )
    stacks = [t for t, _, kernel in kernels if t not in flat and max(kernel) > _KERNEL]
    if stacks:
        warn_caller(
            f"Muon orthogonalises {_shown(stacks)} as one matrix, by joining all axes but the outputs; the shape "
            "suggests a stack of matrices, such as experts or scanned layers. If it is a stack, name it in stacks, so "
            f"that each slice is orthogonalised separately; if it is one matrix, pass splits={{{stacks[0].name!r}: 1}}"
        )
    fused = [t for t, _ in unexplained if _FUSED.search(t.name)]
    if fused:
        warn_caller(
            f"Muon orthogonalises {_shown(fused)} as one matrix; the name suggests several, such as queries, keys and "
            f"values. Pass their number or their rows in splits, such as splits={{{fused[0].name!r}: 3}}; if it is "
            "one matrix, pass 1"
        )
    crossed = [t for t, form in pairs if form.cuts_inputs(t.shape)]
    if crossed:
        warn_caller(
            f"output_axis is {axis}, so splits cuts the shorter axis of {_shown(crossed)}, but the other is 3 times as "
            "long: if queries, keys and values lie side by side there, as in Conv1D of transformers, pass "
            f"output_axis={other}"
        )
    outside = [t for t in matrices if _OUTSIDE.search(t.name)]
    if outside and guess_outside:
        names = _first_three([repr(t.name) for t in outside])
        warn_caller(
            f"Muon orthogonalises {names}, whose names suggest embeddings or heads, but Muon suits matrices between "
            "hidden layers. Name them in others, so that AdamW moves them; if you want Muon for them, pass a function "
            "as others"
        )


def warn_of_first_convolution(
    tensors: Sequence[Tensor], forms: Sequence[Form], chosen: Sequence[bool]
) -> None:
    """Warn if AdamW would move the first convolution only because it looks depthwise, as on grey images.

    Parameters
    ----------
    tensors : sequence of Tensor
        All tensors, in the order of the model.
    forms : sequence of Form
        The form of each.
    chosen : sequence of bool
        Whether ``others`` gives the tensor to AdamW.
    """
    every = zip(tensors, forms, chosen, strict=True)
    kernels = [(t, form, c) for t, form, c in every if form.kernel(t.shape) and form.may_suit(t.shape)]
    # If all look depthwise, as in Mamba, they are.
    if not kernels or (len(kernels) > 1 and all(form.looks_depthwise(t.shape) for t, form, _ in kernels)):
        return
    first, form, is_chosen = kernels[0]
    if not form.suits(first.shape) and not is_chosen:
        warn_caller(
            f"AdamW moves {_shown([first])}, which may be a depthwise convolution: if it is an ordinary one with one "
            f"input channel, as for grey images, pass splits={{{first.name!r}: 1}}, and Muon moves it; if AdamW is to "
            "move it, name it in others"
        )


def _shown(tensors: Sequence[Tensor]) -> str:
    return _first_three([f"{t.name!r} of shape {t.shape}" for t in tensors])


def _first_three(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
