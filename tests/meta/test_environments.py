"""Other environments: a fresh process for what it can import, and simulated ones that leave nothing behind."""

import datetime
import os
import platform
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import qcomp
from qcomp.testing.compressor_case import Case
from qcomp.testing.environments import ENVIRONMENTS
from qcomp.testing.state_laws import same_in_another_process


def test_a_class_that_no_other_process_can_import_is_not_accused():
    @qcomp.register
    @dataclass(frozen=True)
    class Local(qcomp.ScaledSign):
        name: ClassVar[str] = "local_sign"

    same_in_another_process(Case(Local(), np))


def test_simulated_environments_leave_nothing_behind():
    def all_of_it():
        functions = [
            hash,
            os.cpu_count,
            os.getpid,
            socket.gethostname,
            platform.node,
            uuid.getnode,
            time.time,
        ]
        functions += [time.localtime, time.strftime, datetime.datetime, threading.active_count]
        states = dict(os.environ), list(sys.argv), threading.current_thread().name, random.getstate()
        return [*map(id, functions), *states, np.random.get_state()[1].tobytes()]

    before = all_of_it()
    with ExitStack() as stack:
        for context in ENVIRONMENTS.values():
            stack.enter_context(context(2))
        assert os.environ["SLURM_PROCID"] == "2"
        assert datetime.datetime.now().year == time.localtime().tm_year == 2001
        assert all_of_it() != before
    assert all_of_it() == before


SCRIPT = """
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import qcomp
from qcomp.testing.contract import Case
from qcomp.testing.state_laws import same_in_another_process

PROCESSORS = os.cpu_count()


@qcomp.register
@dataclass(frozen=True)
class OfTheScript(qcomp.ScaledSign):
    name: ClassVar[str] = "of_the_script"

    def encode(self, x, key):
        return super().encode(x * PROCESSORS, key)


GUARD
    same_in_another_process(Case(OfTheScript(), np))
    print("no difference")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "found"), [('if __name__ == "__main__":', "another payload"), ("if True:", "no difference")]
)
def test_a_script_is_imported_if_it_can_be(tmp_path, guard, found):
    """Without the usual guard it would start itself again, so it is not tried."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", guard))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert found in done.stdout + done.stderr
