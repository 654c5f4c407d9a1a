"""Broken outer loops are caught: each breaks one thing, and a law or a test of resuming detects it."""

import inspect

import numpy as np
import pytest

import qcomp
from qcomp.core import primitives
from qcomp.core.mean.compressed_mean import CompressedMean
from qcomp.core.outer import loop as module
from qcomp.core.outer import overlapped
from qcomp.core.outer.fragments import due
from tests.outer import test_failures, test_laws, test_overlapped, test_references, test_resume
from tests.outer.jobs import loop_of

LOOP = module.OuterLoop
DEPART, LAND, EXCHANGE = LOOP.depart, LOOP.land, LOOP.exchange


def wrong_sign(self, *given):
    after = DEPART(self, *given)
    return after._replace(arrays={**after.arrays, "sent": tuple(-x for x in after.arrays["sent"])})


def halves_the_outer_gradient(self, *given):
    """Sends half of each outer gradient, as if measured from parameters between the shared and the local ones."""
    after = DEPART(self, *given)
    return after._replace(arrays={**after.arrays, "sent": tuple(x / 2 for x in after.arrays["sent"])})


def keeps_its_anchor(self, fragment, means, tensors, state):
    new, after = LAND(self, fragment, means, tensors, state)
    return new, after._replace(arrays={**after.arrays, "anchor": state.arrays["anchor"]})


def moves_by_its_own(self, fragment, means, tensors, state):
    """Gives the outer optimizer, with its momentum, this rank's outer gradient instead of the mean."""
    return LAND(self, fragment, means._replace(values=means.own), tensors, state)


def forgets_what_it_owes(self, fragment, means, tensors, state):
    exchange = self.mean_of(state).rescaled(means.exchange, 0.0)
    return LAND(self, fragment, means._replace(exchange=exchange), tensors, state)


def forgets_moments(self, fragment, means, tensors, state):
    new, after = LAND(self, fragment, means, tensors, state)
    return new, after._replace(momentum=state.momentum)


def keeps_its_own(self, fragment, means, tensors, state):
    _, after = LAND(self, fragment, means, tensors, state)
    return list(tensors), after


def without_decay(self, state, factor):
    return state


def without_scale(x, factor):
    return x


def divides_by_all_ranks(compressor, payloads, like, *, out=None):
    return primitives.average(compressor, payloads, like, out=out)


def sends_in_its_turn(self, state):
    return due(state.step - self.warmup, self.every, self.fragments)


def aliases(x):
    return x


def mixes_the_other_way(m, g, beta1, scale):
    return (1 - beta1) * m + beta1 * g


def one_step_early(self, state):
    return tuple(
        f for f, step in module.under_way(state.stage).items() if state.step + 2 >= step + self.delay
    )


def no_check(step, state, like):
    return
    yield


def equal_on_all_ranks(self, stage):
    return ()


BROKEN = {
    "wrong sign": (
        LOOP,
        "depart",
        wrong_sign,
        test_laws.test_rounds_of_one_step_equal_the_outer_optimizer,
    ),
    "half": (LOOP, "depart", halves_the_outer_gradient, test_laws.test_sent_and_owed_values_add_up),
    "anchor": (
        LOOP,
        "land",
        keeps_its_anchor,
        test_laws.test_rounds_of_one_step_equal_the_outer_optimizer,
    ),
    "per rank": (
        LOOP,
        "land",
        moves_by_its_own,
        test_laws.test_shared_parameters_are_the_same_on_all_ranks_bit_for_bit,
    ),
    "residual": (LOOP, "land", forgets_what_it_owes, test_laws.test_sent_and_owed_values_add_up),
    "moments": (
        LOOP,
        "land",
        forgets_moments,
        test_laws.test_rounds_of_one_step_equal_the_outer_optimizer,
    ),
    "own": (LOOP, "land", keeps_its_own, test_laws.test_ranks_differ_between_rounds_and_agree_after_them),
    "decay": (CompressedMean, "rescaled", without_decay, test_laws.test_sent_and_owed_values_add_up),
    "scale": (
        primitives,
        "scale",
        without_scale,
        test_references.test_muloco_moves_compressed_tensors_by_the_square_of_its_rate,
    ),
    "senders": (
        primitives,
        "average_of_senders",
        divides_by_all_ranks,
        test_references.test_sparse_loco_divides_by_the_ranks_that_sent_an_element,
    ),
    "turn": (
        LOOP,
        "_departing",
        sends_in_its_turn,
        test_references.test_turns_that_apply_are_those_of_torchft,
    ),
    "alias": (module, "copy", aliases, test_laws.test_returned_parameters_share_no_memory_with_the_state),
    "mixing": (
        primitives,
        "momentum",
        mixes_the_other_way,
        test_laws.test_results_are_mixed_with_the_local_parameters,
    ),
    "early": (
        LOOP,
        "landing",
        one_step_early,
        test_laws.test_a_delayed_result_is_the_result_of_the_step_that_sent_it,
    ),
    "unchecked": (
        module,
        "same_step",
        no_check,
        test_failures.test_ranks_with_different_fragments_are_an_error,
    ),
    "stale": (
        overlapped._Flight,
        "is_of",
        lambda self, state: True,
        test_overlapped.test_going_back_to_an_earlier_state_discards_exchanges_under_way,
    ),
    "shared": (LOOP, "own_kinds", equal_on_all_ranks, test_resume.test_other_ranks_resume_with_the_means),
}
SETTINGS = {
    "how": {},
    "decay": 0.5,
    "scale": 0.5,
    "fragments": 1,
    "case": 3,
    "size": 2,
    "loop": loop_of(outer=qcomp.SGD(learning_rate=0.5, momentum=0.5)),
    "mixing": 0.25,
    "new": 3,
    "stop": 5,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_loop_is_detected(name, monkeypatch):
    place, attribute, broken, law = BROKEN[name]
    options = {key: SETTINGS[key] for key in inspect.signature(law).parameters}
    law(**options)
    monkeypatch.setattr(place, attribute, broken)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        law(**options)


def test_the_list_breaks_different_things():
    assert len({entry[2] for entry in BROKEN.values()}) == len(BROKEN)
    assert np.unique([law.__name__ for *_, law in BROKEN.values()]).size >= 9
