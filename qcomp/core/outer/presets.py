"""Outer loops with published settings: local SGD, DiLoCo, Streaming DiLoCo, SparseLoCo and MuLoCo."""

from typing import Any

from qcomp.core.compressors.qsgd import QSGD
from qcomp.core.compressors.topk import TopK
from qcomp.core.mean.averaging import Averaging
from qcomp.core.optimizers.sgd import SGD
from qcomp.core.outer.loop import OuterLoop


def local_sgd(every: int = 8, **changes: Any) -> OuterLoop:
    """Return LocalSGD: the ranks average their parameters every few steps, exactly.

    Parameters
    ----------
    every : int, default 8
        Inner steps in an outer round; published values are 1 to 64.
    **changes
        Other settings of `OuterLoop`. With ``warmup`` it is post-local SGD (Lin et al., ICLR 2020, with ``every=16``):
        the first ``warmup`` steps average gradients.

    Returns
    -------
    OuterLoop

    Notes
    -----
    The inner optimizer is SGD. A rank sends 2 (N - 1) / N * 32 bits per element and outer round. Source: Stich, ICLR
    2019.

    Examples
    --------
    >>> import qcomp
    >>> qcomp.outer.local_sgd(16, warmup=1000).warmup
    1000
    """
    return OuterLoop(**{"every": every, "outer": SGD(learning_rate=1.0), **changes})


def diloco(every: int = 500, **changes: Any) -> OuterLoop:
    """Return DiLoCo: exact outer gradients, applied by SGD with Nesterov momentum.

    Parameters
    ----------
    every : int, default 500
        Inner steps in an outer round; published values are 50 to 500.
    **changes
        Other settings of `OuterLoop`.

    Returns
    -------
    OuterLoop

    Notes
    -----
    The inner optimizer is AdamW. The outer learning rate is 0.7, its momentum 0.9. With few outer rounds, momentum may
    hurt: compare with ``outer=qcomp.SGD(learning_rate=1.0)``. A rank sends 2 (N - 1) / N * 32 bits per element and
    outer round. Source: Douillard et al., arXiv 2311.08105.

    Examples
    --------
    >>> import qcomp
    >>> qcomp.outer.diloco(100).outer.momentum
    0.9
    """
    return OuterLoop(**{"every": every, "outer": _nesterov(0.7), **changes})


def streaming_diloco(every: int = 100, fragments: int = 4, **changes: Any) -> OuterLoop:
    """Return Streaming DiLoCo: fragments are sent in turn, in 4 bits, and their results are applied some steps later.

    Parameters
    ----------
    every : int, default 100
        Inner steps between two exchanges of the same fragment.
    fragments : int, default 4
        Number of fragments; the paper has one for every three layers of a transformer.
    **changes
        Other settings of `OuterLoop`.

    Returns
    -------
    OuterLoop

    Notes
    -----
    The inner optimizer is AdamW. Delay is 1 and mixing 0.5; the outer learning rate is 0.7, its momentum 0.9. The
    authors send 4-bit floats (a sign and three bits of exponent), without error feedback. Here
    ``QSGD(levels=7, bucket_size=128)`` replaces these floats: it also has 4 bits per element, and is unbiased. A rank
    sends 2 (N - 1) / N * 4.25 bits per element in ``every`` steps. Here a fragment's turn is the step that sends it; in
    torchft it is the step that applies its result, as with ``turn="apply"``. Source: Douillard et al., arXiv
    2501.18512.

    Examples
    --------
    >>> import qcomp
    >>> qcomp.outer.streaming_diloco(60, fragments=6).mixing
    0.5
    """
    settings: dict[str, Any] = {
        "every": every,
        "fragments": fragments,
        "outer": _nesterov(0.7),
        "compressor": QSGD(levels=7, bucket_size=128),
        "averaging": Averaging(feedback=False),
        "delay": 1,
        "mixing": 0.5,
    }
    return OuterLoop(**{**settings, **changes})


def sparse_loco(every: int = 30, **changes: Any) -> OuterLoop:
    """Return SparseLoCo: the 64 largest of 4,096 elements in two bits each, with residuals that decay.

    Parameters
    ----------
    every : int, default 30
        Inner steps in an outer round; published values are 15 to 250.
    **changes
        Other settings of `OuterLoop`.

    Returns
    -------
    OuterLoop

    Notes
    -----
    The inner optimizer is AdamW. The outer learning rate is 1 (published values are 0.4 to 1), without momentum. The
    decay of the residuals is 0.95. The sum of each element is divided by the number of ranks that sent the element, as
    in the authors' code. To divide by the number of all ranks, pass
    ``averaging=qcomp.Averaging(topology="all_gather")``: parameters then move less far, about 1 / N as far if no two
    ranks send the same element. The authors' code also multiplies the outer gradients by the outer learning rate before
    feedback, and their mean once more: if the rate is not 1, also pass it as ``scale``.

    Buckets are runs of 4,096 elements. The two bits of a value are its sign and one of two levels of its bucket. In the
    authors' code, buckets are 64 x 64 blocks of a matrix, and a whole tensor shares four levels. The topology is
    all-gather, so that nothing is compressed twice. A rank sends about (N - 1) * 0.15 bits per element and outer round.
    Source: Sarfi et al., arXiv 2508.15706, and its code in templar.

    Examples
    --------
    >>> import qcomp
    >>> qcomp.outer.sparse_loco(15).averaging.divisor
    'senders'
    """
    settings: dict[str, Any] = {
        "every": every,
        "outer": SGD(learning_rate=1.0),
        "compressor": TopK(k=64, bucket_size=4096, value_bits=2),
        "averaging": Averaging(topology="all_gather", divisor="senders"),
        "decay": 0.95,
    }
    return OuterLoop(**{**settings, **changes})


def muloco(every: int = 30, **changes: Any) -> OuterLoop:
    """Return MuLoCo: few bits and error feedback for outer gradients that come from Muon.

    Parameters
    ----------
    every : int, default 30
        Inner steps in an outer round.
    **changes
        Other settings of `OuterLoop`.

    Returns
    -------
    OuterLoop

    Notes
    -----
    The inner optimizer is Muon, such as ``torch.optim.Muon``. The outer learning rate is 0.8, its momentum 0.9. The
    decay of the residuals is 0.9. The authors' code multiplies outer gradients by the outer learning rate before
    feedback, and multiplies their mean by it again. So compressed tensors move at a rate of 0.64, and exact tensors at
    0.8. In the formula of the paper, the rate occurs only once; for this, pass ``scale=1``.

    The authors send 2 bits per element. Here ``QSGD(levels=3, bucket_size=32)`` sends 4 bits, with its scales, and
    loses about as much as a good 2-bit quantizer. A rank sends 2 (N - 1) / N * 4 bits per element and outer round.
    Source: Therien et al., arXiv 2505.23725, and its code.

    Examples
    --------
    >>> import qcomp
    >>> qcomp.outer.muloco().scale
    0.8
    """
    settings: dict[str, Any] = {
        "every": every,
        "outer": _nesterov(0.8),
        "compressor": QSGD(levels=3, bucket_size=32),
        "decay": 0.9,
        "scale": 0.8,
    }
    return OuterLoop(**{**settings, **changes})


def _nesterov(learning_rate: float) -> SGD:
    return SGD(learning_rate=learning_rate, momentum=0.9, nesterov=True)
