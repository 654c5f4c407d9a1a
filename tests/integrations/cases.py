"""Optimizers of every kind, as source text for the scripts of ranks; these define ``policy``."""

OPTIMIZERS = {
    "onebit_adam": "qcomp.OneBitAdam(learning_rate=0.01, freeze=3, exact=policy)",
    "onebit_adam, coupled decay, groups": (
        "qcomp.OneBitAdam(learning_rate=lambda step: 0.01 / (step + 1), freeze=2, weight_decay=0.1, exact=policy,"
        " decoupled_weight_decay=False, groups=[qcomp.Group('0.*', learning_rate_factor=0.5)])"
    ),
    "onebit_adam, freezes itself": (
        "qcomp.OneBitAdam(learning_rate=0.01, freeze=qcomp.VarianceStable(threshold=0.2), betas=(0.9, 0.5),"
        " exact=policy)"
    ),
    "onebit_adam, measures its variance again": (
        "qcomp.OneBitAdam(learning_rate=0.01, freeze=1, betas=(0.9, 0.5), exact=policy,"
        " watch=qcomp.VarianceWatch(largest=1.01, smallest=0.99, rewarm_steps=1, every=1))"
    ),
    "qadam": "qcomp.QAdam(learning_rate=0.01, freeze=3, exact=policy, variance_steps=None)",
    "qadam, variance steps": (
        "qcomp.QAdam(learning_rate=0.01, freeze=2, exact=policy, variance_steps=qcomp.DoublingIntervals(1))"
    ),
    "draws": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128), exact=policy)"
    ),
    "by name": (
        "qcomp.CompressedSGD(learning_rate=0.01, exact=policy, compressors=qcomp.ByName("
        "{'0.*': qcomp.ScaledSign(), '*': qcomp.QSGD(levels=7, bucket_size=64)}))"
    ),
    "all_gather": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128),"
        " averaging=qcomp.Averaging('all_gather', feedback=False), exact=policy)"
    ),
    "coded": (
        "qcomp.CompressedSGD(learning_rate=0.01, compressor=qcomp.QSGD(levels=7, bucket_size=128, coding='elias'),"
        " exact=policy)"
    ),
    "hierarchical": (
        "qcomp.QAdam(learning_rate=0.01, freeze=2, exact=policy, averaging=qcomp.Averaging('hierarchical'),"
        " variance_steps=None)"
    ),
    "zero_one_adam": (
        "qcomp.ZeroOneAdam(learning_rate=0.01, variance_steps=qcomp.DoublingIntervals(1), exact=policy)"
    ),
    "onebit_lamb": "qcomp.OneBitLamb(learning_rate=0.01, freeze=3, exact=policy)",
    "muon": "qcomp.Muon(learning_rate=0.01, others=['0.*'])",
    "muon, whitened": (
        "qcomp.Muon(learning_rate=0.01, others=['0.*'], compressor=qcomp.LloydMax(bits=2),"
        " whiten_steps=qcomp.DoublingIntervals(2))"
    ),
    "muon, drawn and coded": (
        "qcomp.Muon(learning_rate=lambda step: 0.01 / (step + 1), nesterov=False, block_rows=16,"
        " compressor=qcomp.QSGD(levels=7, bucket_size=64, coding='elias'), weight_decay=0.1,"
        " update_compressor=qcomp.QSGD(levels=7, bucket_size=128))"
    ),
    "muon, exact": (
        "qcomp.Muon(learning_rate=0.01, compressor=qcomp.Identity(), update_compressor=qcomp.Identity())"
    ),
}


SERVERS_DRAW = ("draws", "by name", "coded")
"""The cut into chunks decides which rank serves a bucket, and so with whose draws it is rounded."""
