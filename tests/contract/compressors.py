"""The compressors and configurations for which tests check the whole contract."""

import qcomp

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
