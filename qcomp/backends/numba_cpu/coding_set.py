"""The coders of `qcomp.core.coding`, compiled by numba."""

from qcomp.backends.numba_cpu import coding_gaps, coding_paper, coding_planes, coding_range
from qcomp.core.kernels import Coders

CODERS = Coders(
    name="numba",
    unpack=coding_planes.unpack,
    pack=coding_planes.pack,
    first_invalid=coding_range.first_invalid,
    paper_encode=coding_paper.encode,
    paper_decode=coding_paper.decode,
    count_classes=coding_range.count_classes,
    push=coding_range.push,
    pop=coding_range.pop,
    gaps_encode=coding_gaps.encode,
    gaps_decode=coding_gaps.decode,
)
