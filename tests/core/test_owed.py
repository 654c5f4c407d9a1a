"""What a rank adds to its values when it leaves a mean: what the means so far lack, in every mean with residuals."""

import numpy as np
import pytest

import qcomp
from qcomp.core.mean.averaging import Averaging
from qcomp.core.mean.owed import owed
from tests.core.worlds import NODES, require_sum_identity, start

SIGN = qcomp.ScaledSign(bucket_size=8)
MEANS = {
    "powersgd": qcomp.PowerSGDMean(min_compression=0.5),
    "powersgd, coded": qcomp.PowerSGDMean(qcomp.Cast("bfloat16"), rank=2, min_compression=0.5),
    "two_phase": qcomp.CompressedMean(SIGN),
    "all_gather": qcomp.CompressedMean(SIGN, "all_gather"),
    "ring": qcomp.CompressedMean(SIGN, "ring"),
    "hierarchical": qcomp.CompressedMean(SIGN, "hierarchical"),
    "auto": qcomp.CompressedMean(SIGN, "auto"),
    "tensorwise": Averaging(topology="ring", tensorwise=True).mean(SIGN),
}
WORLDS = {"2": 2, "3": 3, "5": 5, **{name: NODES[name] for name in ("pairs", "3 and 1", "1, 2 and 3")}}


def per_tensor(mean, states, tensors):
    """Return the mean over the ranks of what each owes."""
    of_ranks = [owed(mean, state) for state in states]
    return [
        np.mean([each[i] for each in of_ranks], axis=0).reshape(t.shape) if of_ranks[0] else np.zeros(t.shape)
        for i, t in enumerate(tensors)
    ]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("longest", [4, 40, 400])
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_the_means_so_far_plus_what_is_owed_are_the_exact_means(mean, world, longest):
    draws = np.random.default_rng(longest)
    matrices = [tuple(draws.integers(4, 9, 2).tolist()) for _ in range(2)]
    vectors = [(int(draws.integers(longest // 2, longest)),) for _ in range(2)]
    shapes = [*matrices, *vectors, (0, 3), ()]
    require_sum_identity(mean, world, shapes=[shapes[i] for i in draws.permutation(6)], owes=per_tensor)


@pytest.mark.parametrize("length", [0, 10, 1000])
def test_powersgd_owes_its_residuals_whatever_it_averages_exactly_beside(length):
    tensors = [np.zeros((6, 6)), np.zeros(length)]
    for state in start(MEANS["powersgd"], tensors, 3):
        found, none = owed(MEANS["powersgd"], state._replace(worker=(np.arange(36.0),)))
        assert found.tolist() == list(range(36))
        assert none.tolist() == [0.0] * length


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_nothing_is_owed_to_tensors_without_elements(mean, world):
    tensors = [np.zeros((0,)), np.zeros((3, 0))]
    for state in start(mean, tensors, world):
        assert all(not x.shape[0] for x in owed(mean, state))
