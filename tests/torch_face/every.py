"""Every optimizer for torch: the table for all tests that apply to every one; a test checks that it is complete."""

import qcomp

FREEZE = 4
SMALL = {"exact": qcomp.ExactBelow(100)}
SIGN = qcomp.ScaledSign(bucket_size=64)
FACES = {
    "CompressedSGD": (qcomp.CompressedSGD, {"lr": 0.05, "compressor": qcomp.QSGD(7, 64)}),
    "Muon": (qcomp.Muon, {"lr": 0.01, "compressor": qcomp.QSGD(7, 64), "update_compressor": SIGN}),
    "OneBitAdam": (qcomp.OneBitAdam, {"lr": 0.01, "freeze": FREEZE, "compressor": SIGN}),
    "OneBitLamb": (qcomp.OneBitLamb, {"lr": 0.01, "freeze": FREEZE, "compressor": SIGN}),
    "QAdam": (
        qcomp.QAdam,
        {"lr": 0.01, "freeze": FREEZE, "compressor": qcomp.MinMaxUInt8(64), "variance_steps": None},
    ),
    "ZeroOneAdam": (qcomp.ZeroOneAdam, {"lr": 0.01, "freeze": FREEZE, "compressor": SIGN}),
}


def settings_of(name):
    _, settings = FACES[name]
    return {**settings, **({} if name == "Muon" else SMALL)}
