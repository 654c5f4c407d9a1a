"""How fast ranks encode and decode: measured figures, and an estimate for GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qcomp.core.compressor import Compressor
from qcomp.core.registry import compressor as from_spec


@dataclass(frozen=True)
class Speed:
    """The speed of a compressor, in seconds per element.

    Parameters
    ----------
    encode : float
        Time to compress, with a residual that is updated in place.
    decode : float
        Time to decompress into a buffer.
    add : float
        Time to decompress and add to a sum.
    """

    encode: float
    decode: float
    add: float

    def __post_init__(self) -> None:
        for name in ("encode", "decode", "add"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected seconds per element, at least 0"
                )


@dataclass(frozen=True)
class LowRankSpeed:
    """The speed of PowerSGD, in seconds per element of a matrix, whatever compresses the two factors.

    Parameters
    ----------
    fixed : float
        Seconds that do not depend on the rank of the approximation.
    column : float
        Additional seconds for each column of a factor.
    """

    fixed: float
    column: float

    def __post_init__(self) -> None:
        for name in ("fixed", "column"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected seconds per element, at least 0"
                )


@dataclass(frozen=True)
class Machine:
    """The computing speed of a rank.

    Parameters
    ----------
    source : str
        The source of the figures.
    copy : float
        Seconds to copy a float32 element.
    speeds : mapping of str to Speed
        Speeds of compressors by spec string. A compressor that is not among them gets the speed of the compressor of
        the same name whose payload length is closest. Uncompressed data takes the time of a copy.
    call : float
        Fixed seconds per exchange of a compressed mean: Python, threads, waiting for late ranks. 0 unless measured.
    tensor : float
        Fixed seconds per tensor of a compressed mean.
    low_rank : LowRankSpeed, optional
        Speed of PowerSGD; None if it is not known.
    product : float, optional
        Seconds for each multiplication in a product of square matrices, for Muon; None if it is not known.

    Examples
    --------
    >>> import qcomp
    >>> CPU.speed(qcomp.ScaledSign(bucket_size=1024)) == CPU.speed(qcomp.ScaledSign())
    True
    """

    source: str
    copy: float
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    call: float = 0.0
    tensor: float = 0.0
    low_rank: LowRankSpeed | None = None
    product: float | None = None

    def __post_init__(self) -> None:
        units = {"copy": " per element", "call": "", "tensor": "", "product": " per multiplication"}
        for name, unit in units.items():
            if getattr(self, name) is None and name == "product":
                continue
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected seconds{unit}, at least 0")

    def speed(self, compressor: Compressor) -> Speed:
        """Return the speed of a compressor.

        Raises
        ------
        ValueError
            If there is no figure for a compressor of that name.
        """
        found = self._closest(compressor)
        if found is None:
            known = ", ".join(self.speeds) or "none"
            raise ValueError(
                f"no speed of {compressor.spec} is known; known: {known}. Measure it, or pass a Machine that has it"
            )
        return found

    def knows(self, compressor: Compressor) -> bool:
        """Return whether there is a figure for a compressor of that name."""
        return self._closest(compressor) is not None

    def _closest(self, compressor: Compressor) -> Speed | None:
        """Return the speed of the most similar compressor, or None."""
        if compressor.spec in self.speeds:
            return self.speeds[compressor.spec]
        if compressor.name == "identity":
            return Speed(self.copy, self.copy, self.copy)
        alike = {s: c for s in self.speeds if _kind(c := from_spec(s)) == _kind(compressor)}
        length = _length(compressor)
        closest = min(alike, key=lambda spec: abs(_length(alike[spec]) - length), default=None)
        return None if closest is None else self.speeds[closest]


def _kind(compressor: Compressor) -> tuple[str, bool]:
    """Return what determines a compressor's kernels: the innermost name, and whether a coder runs on the host."""
    spec = compressor.spec
    while "(" in spec.partition(":")[0]:
        spec = spec.partition("(")[2].rpartition(")")[0]
    return spec.partition(":")[0], compressor.variable_length


def _length(compressor: Compressor) -> int:
    return compressor.payload_spec(1 << 16).nbytes


_SIGN, _RMS = "sign:bucket_size=4096,scale=l1", "sign:bucket_size=4096,scale=rms"
_QSGD = "qsgd:levels={},bucket_size=512,norm=max,coding=fixed"
_MINMAX = "minmax:bucket_size=2048"
_LLOYD_MAX = "lloyd_max:bits={},bucket_size={},coding=fixed"
_SPARSE = "topk:k=64,bucket_size=4096,value_bits=2"

CPU = Machine(
    "numba kernels on one core of a 2-core x86_64 server, medians of docs/benchmarks/kernels.json and "
    "docs/planning/rates.json",
    copy=0.431e-9,
    speeds={
        _SIGN: Speed(0.916e-9, 0.187e-9, 0.202e-9),
        _RMS: Speed(1.170e-9, 0.204e-9, 0.200e-9),
        _QSGD.format(1): Speed(1.625e-9, 0.264e-9, 0.237e-9),
        _QSGD.format(7): Speed(1.728e-9, 0.258e-9, 0.248e-9),
        _QSGD.format(127): Speed(1.835e-9, 0.248e-9, 0.233e-9),
        _MINMAX: Speed(1.246e-9, 0.214e-9, 0.223e-9),
        _SPARSE: Speed(3.044e-9, 0.509e-9, 0.4815e-9),
        # The ratio of LloydMax's times to those of QSGD in one run (rates.json), times QSGD's figures above.
        _LLOYD_MAX.format(1, 128): Speed(4.047e-9, 1.945e-9, 1.974e-9),
        _LLOYD_MAX.format(1, 512): Speed(2.079e-9, 0.9203e-9, 1.003e-9),
        _LLOYD_MAX.format(2, 128): Speed(4.164e-9, 0.9205e-9, 1.017e-9),
        _LLOYD_MAX.format(2, 512): Speed(2.547e-9, 0.6584e-9, 0.741e-9),
        _LLOYD_MAX.format(3, 128): Speed(6.361e-9, 3.305e-9, 3.132e-9),
        _LLOYD_MAX.format(3, 512): Speed(3.375e-9, 1.299e-9, 1.335e-9),
        _LLOYD_MAX.format(4, 128): Speed(4.882e-9, 0.8333e-9, 0.9384e-9),
        _LLOYD_MAX.format(4, 512): Speed(3.397e-9, 0.645e-9, 0.7428e-9),
    },
    low_rank=LowRankSpeed(1.845e-9, 0.7076e-9),
    product=0.01996e-9,
)
"""The machine with the kernels of ``qcomp[numba]`` on one core."""

PURE = Machine(
    "without kernels, NumPy on a 2-core x86_64 server, 2^22 elements, medians of docs/benchmarks/kernels.json and "
    "docs/planning/rates.json",
    copy=0.431e-9,
    speeds={
        _SIGN: Speed(21.20e-9, 5.147e-9, 6.750e-9),
        _RMS: Speed(22.11e-9, 5.171e-9, 6.557e-9),
        _QSGD.format(1): Speed(45.66e-9, 11.04e-9, 12.57e-9),
        _QSGD.format(7): Speed(50.26e-9, 8.774e-9, 10.37e-9),
        _QSGD.format(127): Speed(47.52e-9, 8.123e-9, 9.212e-9),
        _MINMAX: Speed(29.06e-9, 2.766e-9, 3.939e-9),
        # The ratio of LloydMax's times to those of QSGD in one run (rates.json), times QSGD's figures above.
        _LLOYD_MAX.format(1, 128): Speed(44.15e-9, 10.23e-9, 11.89e-9),
        _LLOYD_MAX.format(1, 512): Speed(39.49e-9, 9.651e-9, 11.29e-9),
        _LLOYD_MAX.format(2, 128): Speed(52.37e-9, 10.64e-9, 12.42e-9),
        _LLOYD_MAX.format(2, 512): Speed(47.04e-9, 10.32e-9, 11.96e-9),
        _LLOYD_MAX.format(3, 128): Speed(70.11e-9, 17.61e-9, 20.01e-9),
        _LLOYD_MAX.format(3, 512): Speed(62.52e-9, 15.38e-9, 17.62e-9),
        _LLOYD_MAX.format(4, 128): Speed(69.41e-9, 14.89e-9, 17.09e-9),
        _LLOYD_MAX.format(4, 512): Speed(65.14e-9, 14.88e-9, 17.01e-9),
    },
)
"""The machine without kernels, which runs the pure version."""


def gpu(memory_bandwidth: float = 600e9) -> Machine:
    """Return an unmeasured estimate for a GPU, from the bytes that must be moved.

    Parameters
    ----------
    memory_bandwidth : float
        Bytes per second that a kernel achieves; 600 GB/s is two thirds of a V100's nominal bandwidth.

    Notes
    -----
    An encoder reads vector and residual for the scale, reads both again, and writes the residual: 20 bytes per element.
    A decoder writes 4 bytes; to add, it also reads 4. PowerSGD reads gradient and residual and writes their sum, reads
    the sum for each factor, and at the end reads it once more and writes the mean and the residual: 32 bytes. Products
    of matrices are assumed to run at 5e12 multiplications per second. The estimate ignores payloads, and launches of
    some 10 microseconds each. It has no speeds for payloads that are coded on the host.
    """
    if not memory_bandwidth > 0:
        raise ValueError(f"memory_bandwidth is {memory_bandwidth!r}; expected bytes per second, above 0")
    speed = Speed(*(moved / memory_bandwidth for moved in (20, 4, 8)))
    low_rank = LowRankSpeed(32 / memory_bandwidth, 0.0)
    source = f"an estimate: bytes moved over {memory_bandwidth / 1e9:g} GB/s of GPU memory, not measured"
    fixed = [spec for spec in CPU.speeds if not from_spec(spec).variable_length]
    return Machine(
        source,
        copy=8 / memory_bandwidth,
        speeds=dict.fromkeys(fixed, speed),
        low_rank=low_rank,
        product=1 / _MULTIPLICATIONS,
    )


_MULTIPLICATIONS = 5e12
"""Multiplications per second in matrix products on a GPU: two thirds of a V100's nominal float32 rate."""
