"""torch's own tests of optimizers and schedulers hold for optimizers of qcomp, but for the listed differences."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("torch")

NOTHING_TO_AVERAGE = (
    "parameters that require no gradient have no mean, so an optimizer of them alone is a mistake"
)
COMPLEX = "no compressor takes complex numbers; the error names the dtype"
COPIED = "a copy would have the communicator of the original"
EXTENDED = (
    "moments belong to the parameters that the optimizer was made with; groups changed by hand are named"
)
DRAWS = "the draws of QSGD depend on the names of parameters"
OUT_OF_RANGE = "a momentum of 1 or more never decays, and is refused; these schedules go up to 22"
TELLS = "a step without any gradient warns that it changes nothing"

DIFFERENCES = {
    "like_optim": {
        "test_complex_*": COMPLEX,
        "test_deepcopy_copies_all_public_attrs_*": COPIED,
        "test_state_dict_deterministic_*0_False_*1_True_CompressedSGD_*": DRAWS,
        "test_state_dict_deterministic_*0_True_*1_False_CompressedSGD_*": DRAWS,
        "test_state_dict_of_extended_groups_*": EXTENDED,
        "test_step_is_noop_when_params_have_no_grad_*": NOTHING_TO_AVERAGE,
    },
    "test_optim": {
        "test_complex_*": COMPLEX,
        "test_deepcopy_copies_all_public_attrs_*": COPIED,
        "test_state_dict_deterministic_*": EXTENDED,
        "test_step_all_hooks_*": NOTHING_TO_AVERAGE,
        "test_step_is_noop_when_params_have_no_grad_*": NOTHING_TO_AVERAGE,
        "test_step_p*_hook_*": NOTHING_TO_AVERAGE,
    },
    "optim.test_lrscheduler": {
        "test_cycle_lr_[et]*_mode": OUT_OF_RANGE,
        "test_cycle_lr_[et]*_mode_one_lr": OUT_OF_RANGE,
        "test_cycle_lr_[et]*_mode_step_size_up_down": OUT_OF_RANGE,
        "test_cycle_lr_with_adam": OUT_OF_RANGE,
        "test_error_when_getlr_has_epoch": NOTHING_TO_AVERAGE,
        "test_new_pattern_no_warning": TELLS,
        "test_new_pattern_no_warning_with_arg": TELLS,
        "test_onecycle_lr_*annealing*": OUT_OF_RANGE,
        "test_sequentiallr4": NOTHING_TO_AVERAGE,
    },
}
"""Why a test of a module fails here, by patterns of names. `like_optim` is beside this file, the others are torch's."""


@pytest.mark.slow
@pytest.mark.parametrize("module", DIFFERENCES if "QCOMP_TORCH_TESTS" in os.environ else ["like_optim"])
def test_what_differs_is_listed(module):
    environment = {k: v for k, v in os.environ.items() if k != "QCOMP_TORCH_TESTS" or module != "like_optim"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.torch_face.torchs_own.program", module],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout.splitlines()[-1])
    listed = DIFFERENCES[module]
    why = {name: [reason for pattern, reason in listed.items() if fnmatch(name, pattern)] for name in errors}
    assert len(errors) > 100
    assert {name: error for name, error in errors.items() if error and not why[name]} == {}
    assert [name for name, error in errors.items() if not error and why[name]] == []
    assert [pattern for pattern in listed if not any(fnmatch(name, pattern) for name in errors)] == []
