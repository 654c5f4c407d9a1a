"""The primitives: the few computations that kernels replace, each with a pure version, which defines its result.

- `encode` and `decode` with a compressor (and feedback);
- `average` and `compress_mean` over ranks, which are made of `encode`, `decode` and `finish_mean`;
- `average_of_senders`, which is made of `decode`;
- `momentum`, `nesterov` of Muon, `descend`, `scale`, `adam_steps`, and `frozen_steps` of the frozen-variance
  optimizers, with the variant `steps_of_sums` of 0/1 Adam;
- `adam_directions` and `sums_of_squares` of LAMB, and `fresh_variances` of 1-bit LAMB;
- `compensate`, `take_low_rank`, `orthonormal` and `next_factors` of PowerSGD, and `in_range` for a mean over one rank.

Everything else in the core is made of primitives, or runs once per step on small arrays.
"""

from qcomp.core.primitives.encoding import (
    add_sender,
    add_up,
    average,
    average_of_senders,
    compensate,
    compress_mean,
    decode,
    encode,
    finish_mean,
    finish_senders,
    in_range,
    next_factors,
    orthonormal,
    refusal,
    require_accepted,
    take_low_rank,
)
from qcomp.core.primitives.steps import (
    adam_directions,
    adam_step,
    adam_steps,
    blended,
    descend,
    direction,
    empty_like,
    empty_likes,
    fresh_variances,
    frozen_step,
    frozen_steps,
    momentum,
    nesterov,
    rounded,
    scale,
    steps_of_sums,
    sums_of_squares,
)

__all__ = [
    "adam_directions",
    "adam_step",
    "adam_steps",
    "add_sender",
    "add_up",
    "average",
    "average_of_senders",
    "blended",
    "compensate",
    "compress_mean",
    "decode",
    "descend",
    "direction",
    "empty_like",
    "empty_likes",
    "encode",
    "finish_mean",
    "finish_senders",
    "fresh_variances",
    "frozen_step",
    "frozen_steps",
    "in_range",
    "momentum",
    "nesterov",
    "next_factors",
    "orthonormal",
    "refusal",
    "require_accepted",
    "rounded",
    "scale",
    "steps_of_sums",
    "sums_of_squares",
    "take_low_rank",
]
