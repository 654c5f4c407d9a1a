"""The compressors and configurations for which tests check the whole contract, and a shorter check."""

from dataclasses import replace

import qcomp
from qcomp.testing.compressor_case import Case
from qcomp.testing.contract import compressor_contract

COMPRESSORS = [
    qcomp.ScaledSign(),
    qcomp.ScaledSign(bucket_size=8, scale="rms"),
    qcomp.QSGD(),
    qcomp.QSGD(levels=1, bucket_size=128),
    qcomp.QSGD(levels=5, bucket_size=64, norm="l2"),
    qcomp.QSGD(levels=127, bucket_size=512),
    qcomp.QSGD(levels=3, bucket_size=32, norm="l2", coding="elias"),
    qcomp.QSGD(levels=300, bucket_size=16, coding="range"),
    qcomp.LloydMax(bits=1, bucket_size=64),
    qcomp.LloydMax(),
    qcomp.LloydMax(bits=3, bucket_size=8),
    qcomp.LloydMax(bits=4, bucket_size=512),
    qcomp.LloydMax(bits=3, bucket_size=64, coding="range"),
    qcomp.MinMaxUInt8(),
    qcomp.OneBitSGD(column_size=100),
    qcomp.TopK(k=5, bucket_size=64),
    qcomp.TopK(k=8, bucket_size=512),
    qcomp.TopK(k=5, bucket_size=64, value_bits=2),
    qcomp.TopK(k=8, bucket_size=512, value_bits=4, coding="fixed"),
    qcomp.RandK(k=8, bucket_size=64),
    qcomp.RandK(k=16, bucket_size=64, value_bits=4),
    qcomp.Identity(),
    qcomp.Cast("bfloat16"),
    qcomp.Cast("float16"),
    qcomp.Scaled(qcomp.QSGD(levels=3, bucket_size=32)),
    qcomp.WholeFields(qcomp.QSGD(levels=3, bucket_size=64), field=25),
    qcomp.WholeFields(qcomp.TopK(k=5, bucket_size=64), field=9),
]


def check_but_averages(compressor, xp):
    """Check the laws on a library other than NumPy; those of averages run on NumPy for every library."""
    contract = compressor_contract(Case(compressor, xp), 5)
    replace(contract, groups=contract.groups[:-1]).require()
