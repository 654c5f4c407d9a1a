"""`check_optimizer`: checks whether an optimizer keeps its promises."""

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

from qcomp.core.optimizers.base import Optimizer
from qcomp.testing import optimizer_laws, setting_laws
from qcomp.testing.jobs import OptimizerCase
from qcomp.testing.law_groups import Contract
from qcomp.testing.libraries import Namespace

_Law = Callable[[OptimizerCase], None]

_LAWS: tuple[tuple[_Law, ...], ...] = (
    (optimizer_laws.ranks_agree, optimizer_laws.shapes_and_dtypes, optimizer_laws.compresses_soon),
    (
        optimizer_laws.against_the_gradient,
        optimizer_laws.same_again,
        optimizer_laws.only_results_are_new,
        optimizer_laws.keeps_no_gradients,
        optimizer_laws.donation_changes_nothing,
        optimizer_laws.saved_after_any_step,
        optimizer_laws.counts_are_kept,
        optimizer_laws.goes_on_in_another_process,
        optimizer_laws.another_world_goes_on,
        optimizer_laws.refusals_are_shared,
        optimizer_laws.starts_alike,
        optimizer_laws.over_a_communicator,
        optimizer_laws.keeps_new_residuals,
        optimizer_laws.weights_scale_gradients,
        setting_laws.rates_scale_the_step,
        setting_laws.schedules_count_completed_steps,
        setting_laws.groups_select_by_name,
        setting_laws.switches_act,
        setting_laws.weight_decay_shrinks,
        setting_laws.clipping_scales_gradients,
        setting_laws.gradients_are_averaged,
        setting_laws.long_tensors_move_to_the_end,
        setting_laws.equal_ranks_move_as_one,
        setting_laws.nothing_is_lost,
        setting_laws.draws_have_keys_of_their_own,
    ),
)
"""The laws about an optimizer, in groups; later groups rely on earlier groups."""


def check_optimizer(optimizer: Optimizer, xp: Namespace = np) -> None:
    """Check that an optimizer keeps the promises of `qcomp.Optimizer`.

    All ranks hold the same after each of twelve steps. Arguments are not written to. A job that is saved after any step
    goes on with the same bits, even in another process. On more or fewer ranks it resumes with the same mean moments
    and residuals, or every rank refuses to load it. A non-finite gradient stops all ranks and changes nothing. Ranks
    that were not started alike raise. Donation changes nothing. Steps keep the residuals that exchanges return, and SGD
    adds later what compression has lost. The shared settings (rate and schedule, groups, weight decay, clipping, seed)
    have the effects that `qcomp.Optimizer` describes. Boolean settings such as ``nesterov`` have an effect, or are
    refused.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer to check. Its step takes one gradient of each parameter. Choose settings with which it passes
        through all its stages within twelve steps, such as ``freeze=5``: laws test only the stages that it reaches. A
        law is broken if the optimizer has an ``averaging`` but compresses nothing within these steps.
    xp : namespace
        The array library to run on.

    Raises
    ------
    ContractError
        If laws are broken. The error names the broken laws of the first group that has any.
    TypeError
        If ``optimizer`` is not an instance of an optimizer.

    Examples
    --------
    A single law takes less time:

    >>> import qcomp
    >>> contract = qcomp.testing.contract_of(qcomp.CompressedSGD(learning_rate=0.1))
    >>> contract.require(only="saved_after_any_step")
    """
    optimizer_contract(optimizer, xp).require()


def optimizer_contract(optimizer: Optimizer, xp: Namespace = np) -> Contract:
    """Return the laws about an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}; expected an instance of a subclass of qcomp.Optimizer")
    case = OptimizerCase(optimizer, xp)
    groups = [[(law.__name__, partial(_quietly, law, case)) for law in group] for group in _LAWS]
    return Contract(repr(case), groups)


def _quietly(law: _Law, case: OptimizerCase) -> None:
    """Check a law without the warnings that an optimizer gives in such a short run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        law(case)
