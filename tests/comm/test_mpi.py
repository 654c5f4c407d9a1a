"""MPICommunicator on real ranks: each test is a script that mpirun starts."""

import functools
import os
import re
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi

SECONDS = 60.0  # any job must end within this time; one without trouble takes about a second

HEAD = """
import fcntl, os, signal, sys, termios, threading
import numpy as np
from mpi4py import MPI
from qcomp.comm.mpi import MPICommunicator
from qcomp.core.errors import CommunicatorError

comm = MPICommunicator(MPI.COMM_WORLD, timeout=60)  # however long the ranks take to start
comm.timeout = {timeout}
me, n = comm.rank, comm.size

def zeros(size):
    return np.zeros(size, dtype=np.uint8)

def say(*words):
    # One write for each line, since the ranks share the stream. Then wait until mpirun's proxy has read it:
    # when another rank aborts the job, what is still in the pipe is lost.
    os.write(1, (" ".join(map(str, (me, *words))) + "\\n").encode())
    while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):
        pass

def be_absent():
    # Waits without the communicator and MPI, for longer than any test lasts.
    threading.Event().wait(1000)
"""


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
small_and_large = pytest.mark.parametrize("size", [pytest.param(4, id="small"), slow(4_000_000, id="large")])
"""A size that MPI sends eagerly, and one that it does not."""


def script(body, *, timeout=60):
    return ["-c", HEAD.format(timeout=timeout) + body]


def said(result):
    """Return the lines of all ranks, in order of rank."""
    return sorted(result.stdout.splitlines())


OF_ONE_JOB = {}
"""Scripts of two ranks that end without trouble, by name."""


@pytest.fixture(scope="module")
def in_one_job(mpirun):
    """Return the lines of all ranks for a script of `OF_ONE_JOB`; one job runs them all, each as a function."""
    code = [START, "speak = say\n"]
    for name, body in OF_ONE_JOB.items():
        indented = body.replace("\n", "\n    ")
        code.append(
            f"def of_its_own():\n    def say(*words):\n        speak({name!r}, *words)\n{indented}\nof_its_own()\n"
        )
    lines = said(mpirun(2, script("".join(code))))

    def said_in(name):
        return [f"{rank} {rest}" for rank, of, rest in (line.split(" ", 2) for line in lines) if of == name]

    return said_in


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [1, slow(2), 3])
def test_it_keeps_the_laws_of_communicators(mpirun, n):
    """Also with sizes beyond what MPI sends eagerly, and with many small messages, where ranks run ahead of others."""
    body = """
from qcomp.testing import check_communicator

check_communicator(comm)
for size in (0, 1, 1001, 3_000_001):
    sizes = [size * r for r in range(n)]
    received = comm.all_gather(np.full(sizes[me], me + 40, dtype=np.uint8), sizes)
    assert all(np.array_equal(received[r], np.full(sizes[r], r + 40)) for r in range(n))
say("ok")
"""
    result = mpirun(n, script(body))
    assert said(result) == [f"{rank} ok" for rank in range(n)]
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [("numpy", "array_api_strict"), slow("torch", "jax.numpy")],
)
def test_each_rank_gets_arrays_of_its_own_library(mpirun, first, second):
    for name in (first, second):
        pytest.importorskip(name)
    body = f"""
if me == 0:
    import {first} as xp
else:
    import {second} as xp
mine = xp.arange(10 * me, 10 * me + 3, dtype=xp.uint8)
received = comm.all_gather(mine, [3, 3])
assert [type(x) for x in received] == [type(mine)] * 2
say(*[np.asarray(x).tolist() for x in received])
"""
    assert said(mpirun(2, script(body))) == [f"{rank} [0, 1, 2] [10, 11, 12]" for rank in range(2)]


OF_ONE_JOB["a_buffer_may_be_overwritten_once_the_exchange_is_over"] = """
size = 2_000_000
mine = zeros(size * me)
for i in range(10):
    mine[:] = i
    received = comm.all_to_all([mine, zeros(0)], [0, 0 if me else size])
    mine[:] = 255
    assert me or (received[1] == i).all()
say("ok")
"""


@pytest.mark.slow
def test_a_buffer_may_be_overwritten_once_the_exchange_is_over(in_one_job):
    assert in_one_job("a_buffer_may_be_overwritten_once_the_exchange_is_over") == ["0 ok", "1 ok"]


@pytest.mark.slow
def test_an_error_of_mpi_is_a_communicator_error(mpirun):
    body = """
comm._comm.Free()
for _ in range(2):
    try:
        comm.all_gather(zeros(1), [1, 1])
    except CommunicatorError as error:
        say(str(error).partition("MPI_ERR")[0].partition("Invalid")[0])
MPI.COMM_WORLD.Barrier()
"""
    result = mpirun(2, script(body), timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert said(result) == [
        f"{rank} all_gather: {closed}MPI failed: "
        for rank in range(2)
        for closed in ("", "this communicator is closed: all_gather: ")
    ]


OF_ONE_JOB["errors_of_mpi_are_never_fatal_whatever_the_user_chose"] = """
strict = MPI.COMM_WORLD.Dup()
strict.Set_errhandler(MPI.ERRORS_ARE_FATAL)
own = MPICommunicator(strict)._comm
say(own.Get_errhandler() == MPI.ERRORS_RETURN, strict.Get_errhandler() == MPI.ERRORS_ARE_FATAL)
"""


@pytest.mark.slow
def test_errors_of_mpi_are_never_fatal_whatever_the_user_chose(in_one_job):
    assert in_one_job("errors_of_mpi_are_never_fatal_whatever_the_user_chose") == [
        "0 True True",
        "1 True True",
    ]


OF_ONE_JOB["messages_of_the_user_are_never_taken"] = """
request = MPI.COMM_WORLD.Isend([np.full(4, 9, dtype=np.uint8), MPI.BYTE], dest=1 - me, tag=1)
assert comm.all_gather(zeros(4), [4, 4])[1 - me].tolist() == [0] * 4
mine = zeros(4)
MPI.COMM_WORLD.Recv([mine, MPI.BYTE], source=1 - me, tag=1)
request.Wait()
assert mine.tolist() == [9] * 4
other = MPICommunicator(MPI.COMM_WORLD, timeout=30)
assert [x.tolist() for x in other.all_gather(np.array([me], dtype=np.uint8), [1, 1])] == [[0], [1]]
say("ok")
"""


@pytest.mark.slow
def test_messages_of_the_user_are_never_received(in_one_job):
    assert in_one_job("messages_of_the_user_are_never_taken") == ["0 ok", "1 ok"]


def test_constructor_rejects_nonsense(mpirun):
    body = """
for wrong in (None, MPI.COMM_NULL, MPI.COMM_WORLD.Get_group()):
    try:
        MPICommunicator(wrong)
    except TypeError as error:
        assert "comm must be an mpi4py.MPI.Intracomm, got " in str(error)
    else:
        say("accepted", wrong)
try:
    MPICommunicator(MPI.COMM_WORLD, timeout=0)
except ValueError as error:
    say(error)
"""
    assert said(mpirun(1, script(body))) == ["0 timeout must be a positive number of seconds, got 0"]


@pytest.mark.slow
@small_and_large
def test_an_absent_peer_is_named_and_the_job_ends(mpirun, size):
    body = f"""
comm.all_gather(zeros(1), [1] * n)  # all have started
if me == 1:
    be_absent()
comm.all_gather(zeros({size}), [{size}] * n)
"""
    result = mpirun(3, script(body, timeout=2), timeout=SECONDS, check=False)  # rank 2 arrives within it
    assert result.returncode == 1
    assert "CommunicatorError: all_gather: waited 2 s: nothing came from rank 1" in result.stderr
    assert "Traceback" in result.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_take_part_in_the_creation_is_noticed(mpirun):
    code = """
from mpi4py import MPI
from qcomp.comm.mpi import MPICommunicator
import threading
if MPI.COMM_WORLD.rank == 1:
    threading.Event().wait(1000)
try:
    MPICommunicator(MPI.COMM_WORLD, timeout=0.5)
except RuntimeError as error:
    print(error)
"""
    result = mpirun(2, ["-c", code], timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert "MPICommunicator: waited 0.5 s for the other 1 ranks to create theirs" in result.stdout


@pytest.mark.slow
def test_a_closed_communicator_stays_closed_and_the_job_ends_though_the_error_was_caught(mpirun):
    body = """
if me == 1:
    be_absent()
for verb in ("all_gather", "all_to_all"):
    try:
        comm.all_gather(zeros(1), [1, 1]) if verb == "all_gather" else comm.all_to_all([zeros(1)] * 2, [1, 1])
    except CommunicatorError as error:
        say(error)
"""
    result = mpirun(2, script(body, timeout=0.5), timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert said(result) == [
        "0 all_gather: waited 0.5 s: nothing came from rank 1",
        "0 all_to_all: this communicator is closed: all_gather: waited 0.5 s: nothing came from rank 1",
    ]


# After an error that every rank catches, the ranks meet again in MPI's own communicator, so that no rank ends the
# job before all have printed their lines.
CATCH = """
try:
    work()
except CommunicatorError as error:
    say(error)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "sent", "announced"),
    [
        (1_000_000, 5, 4),
        slow(1, 4, 5),
        slow(1, 5, 4),
        slow(1_000_000, 4, 5),
        *(slow(scale, *sizes) for scale in (1, 1_000_000) for sizes in ((0, 1), (1, 0))),
    ],
)
def test_another_size_is_named_and_reported_to_every_rank(mpirun, sent, announced, scale):
    sent, announced = sent * scale, announced * scale
    body = f"""
def work():
    send, receive = [zeros(2)] * 3, [2] * 3
    if me == 1:
        send[2] = zeros({sent})
    if me == 2:
        receive[1] = {announced}
    comm.all_to_all(send, receive)
    comm.all_gather(zeros(1), [1] * 3)  # ranks that were not involved learn of it here
"""
    result = mpirun(3, script(body + CATCH), timeout=SECONDS, check=False)
    lines = said(result)
    assert len(lines) == 3, result
    for line in lines:
        assert f"rank 1 sent {sent} bytes to rank 2, which expected {announced} bytes" in line
    assert lines[2].startswith("2 all_to_all: rank 1 sent")
    assert "rank 2 failed" in lines[0]
    assert "rank 2 failed" in lines[1]


@pytest.mark.slow
def test_another_verb_is_named_on_every_rank(mpirun):
    body = """
def work():
    if me == 1:
        comm.all_gather(zeros(1), [1] * 3)
    else:
        comm.all_to_all([zeros(1)] * 3, [1] * 3)
"""
    lines = said(mpirun(3, script(body + CATCH), timeout=SECONDS, check=False))
    assert len(lines) == 3
    for line in lines:
        assert re.search(
            "rank [02] called all_to_all where rank 1 called all_gather"
            "|rank 1 called all_gather where rank [02] called all_to_all",
            line,
        )


@pytest.mark.slow
def test_an_interrupted_exchange_closes_the_communicator(mpirun):
    body = """
def interrupt(*_):
    raise OSError("enough")

comm.all_gather(zeros(1), [1, 1])  # also imports everything: the interruption must strike while waiting
if me == 1:
    be_absent()
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    comm.all_gather(zeros(1), [1, 1])
except OSError:
    pass
try:
    comm.all_gather(zeros(1), [1, 1])
except CommunicatorError as error:
    say(error)
"""
    result = mpirun(2, script(body), timeout=SECONDS, check=False)
    assert said(result) == [
        "0 all_gather: this communicator is closed: all_gather was interrupted by OSError: enough"
    ]


def test_a_rank_that_raises_ends_the_job_with_its_traceback(mpirun):
    body = """
comm.all_gather(zeros(1), [1] * 3)
if me == 1:
    print("unflushed words", end="")
    raise ZeroDivisionError("boom")
be_absent()
"""
    result = mpirun(3, script(body), timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "ZeroDivisionError: boom" in result.stderr
    assert "unflushed words" in result.stdout


def test_an_abort_loses_nothing_of_what_was_printed(mpirun):
    body = """
if me == 1:
    print("p" * 60_000, "printed")
    raise ZeroDivisionError("z" * 60_000 + "raised")
be_absent()
"""
    result = mpirun(2, script(body), timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert result.stdout.endswith("p printed\n")
    assert "z" * 60_000 + "raised" in result.stderr


@pytest.mark.slow
def test_the_excepthook_before_is_still_called_and_may_itself_fail(mpirun):
    code = (
        "import sys\n"
        "def hook(kind, value, traceback):\n"
        "    sys.stderr.write('my own hook\\n')\n"
        "    raise OSError('disk full')\n"
        "sys.excepthook = hook\n"
        + HEAD.format(timeout=60)
        + "if me == 1:\n    raise ZeroDivisionError\nbe_absent()\n"
    )
    result = mpirun(2, ["-c", code], timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert "my own hook" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["sys.exit(3)", slow("raise SystemExit('no more')"), slow("sys.exit(0)")])
def test_a_rank_that_leaves_early_is_reported_to_those_who_wait(mpirun, leave):
    body = f"""
comm.all_gather(zeros(1), [1] * 3)
if me == 1:
    {leave}
comm.all_gather(zeros(1), [1] * 3)
"""
    result = mpirun(3, script(body), timeout=SECONDS, check=False)
    assert result.returncode != 0
    assert "CommunicatorError: all_gather: rank 1 has finished without calling it" in result.stderr


@pytest.mark.slow
def test_a_rank_may_finish_while_the_others_complete_the_last_exchange(mpirun):
    body = """
for _ in range(20):
    comm.all_gather(zeros(100_000), [100_000] * 3)
if me == 2:
    from qcomp.comm.mpi_exit import FINISHED_TAG
    while not all(comm._comm.Iprobe(source=peer, tag=FINISHED_TAG) for peer in (0, 1)):
        pass
say("ok")
"""
    result = mpirun(3, script(body), timeout=SECONDS)
    assert (said(result), result.stderr) == (["0 ok", "1 ok", "2 ok"], "")


@pytest.mark.slow
def test_a_finished_rank_stays_until_the_others_have_finished(mpirun, tmp_path):
    # Exit functions run in reverse order: this one runs after rank 0 has said farewell.
    before = f"""
import atexit, pathlib
finished = pathlib.Path({str(tmp_path / "finished")!r})
atexit.register(lambda: print(finished.exists()))
"""
    body = """
if me == 1:
    from qcomp.comm.mpi_exit import FINISHED_TAG
    while not comm._comm.Iprobe(source=0, tag=FINISHED_TAG):
        pass
    finished.touch()
"""
    code = before + script(body)[1]
    assert mpirun(2, ["-c", code], timeout=SECONDS).stdout.split() == ["True", "True"]


def test_a_killed_rank_ends_the_job(mpirun):
    body = """
comm.all_gather(zeros(1), [1] * 3)
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.all_gather(zeros(1), [1] * 3)
"""
    result = mpirun(3, script(body), timeout=SECONDS, check=False)
    assert result.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, slow(4_000_000)])
def test_a_stopped_rank_is_named_long_before_the_timeout(mpirun, size):
    body = f"""
comm = MPICommunicator(MPI.COMM_WORLD, timeout=1000, silence=1.0)
comm.all_gather(zeros(1), [1] * 3)
if me == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    comm.all_gather(zeros({size}), [{size}] * 3)
"""
    result = mpirun(3, script(body), timeout=SECONDS, check=False)
    assert result.returncode != 0
    assert "nothing was heard of rank 1 for 1 s: it was stopped or cut off" in result.stderr


@pytest.mark.slow
def test_a_rank_that_holds_pythons_lock_is_reported_and_waited_for(mpirun):
    body = """
import ctypes, warnings
from qcomp.comm import lifelines
lifelines.SILENCE = 0.5
comm = MPICommunicator(MPI.COMM_WORLD, timeout=60)
comm.all_gather(zeros(1), [1, 1])
if me == 1:
    ctypes.PyDLL(None).usleep(1_500_000)  # without releasing the lock
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for size in (4, 4_000_000, 4):
        assert len(comm.all_gather(zeros(size), [size] * 2)) == 2
say(*[str(w.message).partition(" for ")[0].partition(",")[0] for w in told])
"""
    assert said(mpirun(2, script(body))) == ["0 nothing was heard of rank 1 rank 1 is heard again", "1"]


OF_ONE_JOB["communicators_are_released"] = """
import gc

def kept():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()

before = kept()
for attempt in range(20):
    part = MPI.COMM_WORLD.Split(0)
    own = MPICommunicator(part, timeout=60)
    own.all_gather(zeros(9), [9, 9])
    if attempt % 2:
        own.close()
        try:
            own.all_gather(zeros(1), [1, 1])
        except CommunicatorError as error:
            assert str(error) == "all_gather: this communicator is closed: close was called", error
        own.close()
    del own
    part.Free()
# Once the other rank has left, too; MPI itself opens descriptors at first use.
while kept()[1] > before[1]:
    pass
say("kept", kept()[0] - before[0] < 20)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="this system does not list descriptors")
def test_threads_and_connections_of_a_communicator_end_with_it(in_one_job):
    """Sixty of them held 61 threads and 270 descriptors."""
    assert in_one_job("communicators_are_released") == ["0 kept True", "1 kept True"]


@pytest.mark.slow
def test_an_exchange_that_others_wait_for_fails_if_a_rank_closes_its_communicator(mpirun):
    body = """
part = MPICommunicator(MPI.COMM_WORLD, timeout=50)
part.all_gather(zeros(1), [1, 1])
if me == 1:
    part.close()
else:
    try:
        part.all_gather(zeros(1), [1, 1])
    except CommunicatorError as error:
        say(error)
MPI.COMM_WORLD.Barrier()
"""
    result = mpirun(2, script(body), timeout=SECONDS, check=False)
    assert said(result) == ["0 all_gather: rank 1 has finished, died or given up: its connection is closed"]


@pytest.mark.parametrize("end", ["os._exit(0)", slow("sys.exit(0)"), slow("raise ZeroDivisionError")])
def test_a_forked_child_does_nothing_for_its_rank(mpirun, end):
    body = f"""
import gc, warnings
comm.all_gather(zeros(1), [1, 1])
if me == 0:
    child = os.fork()
    if child == 0:
        for call in (lambda: comm.all_gather(zeros(1), [1, 1]), lambda: MPICommunicator(MPI.COMM_WORLD)):
            try:
                call()
            except CommunicatorError as error:
                say(str(error).replace(str(os.getpid()), "CHILD").replace(str(os.getppid()), "RANK"))
        del comm
        gc.collect()
        {end}
    status = os.waitpid(child, 0)[1]
    say(os.waitstatus_to_exitcode(status))
comm.all_gather(zeros(4), [4, 4])
say("ok")
"""
    result = mpirun(2, script(body), timeout=SECONDS)
    of_child = "process CHILD is a forked child of"
    assert said(result) == [
        f"0 {int(end != 'os._exit(0)')}",
        f"0 MPICommunicator: {of_child} a rank (process RANK), whose connections it must not use: create "
        "communicators in ranks only",
        f"0 all_gather: {of_child} rank 0 (process RANK), whose connections it must not use: let children, such as a "
        "data loader's workers, only compute, and call exchanges in the rank",
        "0 ok",
        "1 ok",
    ]
    assert ("end forked children with os._exit" in result.stderr) == (end != "os._exit(0)")


@pytest.mark.slow
def test_a_rank_that_ends_before_the_next_creation_is_noticed_at_once(mpirun):
    body = """
if me == 1:
    sys.exit(0)
try:
    MPICommunicator(MPI.COMM_WORLD, timeout=1000)
except CommunicatorError as error:
    say(error)
"""
    result = mpirun(3, script(body), timeout=SECONDS, check=False)
    ended = "MPICommunicator: rank 1 ended before it created its own"
    assert f"0 {ended}" in said(result) or f"2 {ended}" in said(result), result


@pytest.mark.slow
def test_exit_codes_without_trouble(mpirun):
    assert mpirun(2, script("say('ok')"), timeout=SECONDS).returncode == 0
    assert mpirun(2, script("sys.exit(5 * me)"), timeout=SECONDS, check=False).returncode == 5


@pytest.mark.parametrize(
    "body",
    [
        slow("be_absent()", id="computing"),
        pytest.param("comm.all_gather(zeros(1), [1, 1]) if me == 0 else be_absent()", id="in an exchange"),
        slow("be_absent() if me == 1 else None", id="in the farewell"),
    ],
)
def test_control_c_ends_all_ranks_quietly(launcher, body):
    with subprocess.Popen(
        [str(launcher), "-n", "2", sys.executable, *script(f"say('ready')\n{body}")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            assert {job.stdout.readline() for _ in range(2)} == {"0 ready\n", "1 ready\n"}
            job.send_signal(signal.SIGINT)
            _, err = job.communicate(timeout=SECONDS)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 130
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["threads", "exit functions"])
def test_control_c_between_the_last_line_and_the_farewell_ends_all_ranks_quietly(mpirun, slot):
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    bodies = {
        "threads": f"""
def interrupt():
    threading.main_thread().join()
    {interrupt}
threading.Thread(target=interrupt).start()
""",
        "exit functions": f"""
import atexit
atexit.register(lambda: {interrupt})
""",
    }
    body = "if me == 1:\n    be_absent()\n" + bodies[slot]
    result = mpirun(2, script(body), timeout=SECONDS, check=False)
    assert result.returncode == 130
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_mismatched_handshake_ends_on_every_rank_with_the_message(mpirun):
    body = """
import functools
import numpy as np
from qcomp.core import handshake as core
handshake = functools.partial(core.handshake, like=np.zeros(0))
from qcomp.core.errors import MismatchError
handshake(comm, {"seed": 0})
try:
    handshake(comm, {"compressor": "sign" if me != 1 else "qsgd", "seed": 0})
except MismatchError as error:
    say(error)
"""
    message = "the ranks were not started alike: compressor is 'sign' on ranks 0 and 2, but 'qsgd' on rank 1"
    assert said(mpirun(3, script(body), timeout=SECONDS)) == [f"{rank} {message}" for rank in range(3)]
    raised = mpirun(3, script(body.replace("say(error)", "raise")), timeout=SECONDS, check=False)
    assert raised.returncode == 1
    assert f"MismatchError: {message}" in raised.stderr


@pytest.mark.slow
def test_memory_stays_while_a_failed_exchange_is_under_way(mpirun):
    body = """
import gc, weakref

if me == 1:
    be_absent()
mine = zeros(4_000_000)
memory = weakref.ref(mine)
try:
    comm.all_gather(mine, [mine.size] * 2)
except CommunicatorError:
    pass
del mine
gc.collect()
say("kept" if memory() is not None else "freed")
"""
    result = mpirun(2, script(body, timeout=0.3), timeout=SECONDS, check=False)
    assert said(result) == ["0 kept"]


# --- exchanges that are waited for later -----------------------------------------------------------------------------

START = "from qcomp.core.mean.stages import AllGather, AllToAll\n"


@pytest.mark.slow
def test_several_exchanges_are_under_way_at_once_and_waited_for_in_any_order(mpirun):
    body = """
sizes = (5, 3_000_001, 0, 5)
pending = []
for i, size in enumerate(sizes):
    if i % 2:
        request = AllToAll(tuple(np.full(size + r, i + me, dtype=np.uint8) for r in range(n)), (size + me,) * n)
    else:
        request = AllGather(np.full(size, i + me, dtype=np.uint8), (size,) * n)
    pending.append(comm.start(request))
for i in (2, 0, 3, 1) if me else (3, 2, 1, 0):
    received = pending[i].wait()
    assert [x.size for x in received] == [sizes[i] + me * (i % 2)] * n
    assert all((x == i + r).all() for r, x in enumerate(received))
    assert pending[i].wait() is received
assert not comm._under_way
say(comm.bytes_sent == sum(sizes) * (n - 1) + 2 * sum(r for r in range(n) if r != me))
"""
    assert said(mpirun(3, script(START + body))) == [f"{rank} True" for rank in range(3)]


NOT_BEFORE = """
# Rank 1 starts its part only when rank 0 has said, outside of the communicator, that it has gone on.
word, large = zeros(1), np.full(3_000_000, me, dtype=np.uint8)
if me == 1:
    MPI.COMM_WORLD.Recv([word, MPI.BYTE], source=0)
pending = [comm.start(AllGather(large, (large.size,) * n)) for _ in range(2)]
if me == 0:
    MPI.COMM_WORLD.Send([word, MPI.BYTE], dest=1)
assert all(int(p.wait()[1 - me][-1]) == 1 - me for p in pending)
say("ok")
"""


@pytest.mark.slow
def test_starting_an_exchange_does_not_block_and_a_blocking_start_is_noticed(mpirun):
    assert said(mpirun(2, script(START + NOT_BEFORE))) == ["0 ok", "1 ok"]
    blocking = """
from qcomp.comm.verbs import Completed
comm.start = lambda request: Completed(comm.all_gather(request.send, request.receive))
"""
    result = mpirun(2, script(START + blocking + NOT_BEFORE, timeout=0.5), timeout=SECONDS, check=False)
    assert "nothing came from rank 1" in result.stderr


OF_ONE_JOB["a_later_start_moves_what_was_started_before"] = """
large = np.full(30_000_000, me, dtype=np.uint8)
first = comm.start(AllGather(large, (large.size,) * n))
def small():
    comm.start(AllGather(zeros(1), (1,) * n))

begun = 0
while not first.is_complete:
    if begun < 5:
        small()
        begun += 1
    else:
        comm._advance()
for _ in range(begun, 5):  # the other rank may have started more before the large one ended
    small()
for pending in tuple(comm._under_way):
    pending.wait()
say("moved without a wait", int(first.wait()[1 - me][7]))
"""


def test_starting_an_exchange_advances_earlier_ones(in_one_job):
    assert in_one_job("a_later_start_moves_what_was_started_before") == [
        f"{rank} moved without a wait {1 - rank}" for rank in (0, 1)
    ]


@pytest.mark.slow
def test_a_wrong_size_closes_the_communicator_for_all_exchanges_under_way(mpirun):
    body = """
def tell(call):
    # A late rank learns of the error when it starts the next exchange, the others when they wait.
    try:
        return call()
    except CommunicatorError as error:
        say(error)

def right():
    return comm.start(AllGather(zeros(1), (1,) * 3))

sizes = (2,) * me + (2 + me // 2,) + (2,) * (2 - me)
pending = [
    tell(right),
    tell(lambda: comm.start(AllGather(zeros(2 + me // 2), sizes))),
    tell(right),
]
for exchange in pending:
    if exchange is not None:
        tell(exchange.wait)
# Rank 2 has received what it expected, and may learn of the error only in its next exchange.
more = tell(right)
if more is not None:
    tell(more.wait)
tell(right)
MPI.COMM_WORLD.Barrier()
"""
    lines = said(mpirun(3, script(START + body), timeout=SECONDS, check=False))
    for rank in range(3):
        own = [line[2:] for line in lines if line.startswith(f"{rank} ")]
        assert any("rank 2 sent 3 bytes to rank" in line and "expected 2 bytes" in line for line in own)
        assert "all_gather: this communicator is closed: all_gather:" in own[-1]


@pytest.mark.slow
def test_another_verb_under_way_is_named_on_every_rank(mpirun):
    body = """
def work():
    first = comm.start(AllGather(zeros(1), (1,) * 3))
    if me == 1:
        second = comm.start(AllGather(zeros(1), (1,) * 3))
    else:
        second = comm.start(AllToAll((zeros(1),) * 3, (1,) * 3))
    first.wait(), second.wait()
    comm.all_gather(zeros(1), (1,) * 3)
"""
    lines = said(mpirun(3, script(START + body + CATCH), timeout=SECONDS, check=False))
    assert len(lines) == 3
    for line in lines:
        assert re.search("called all_(to_all|gather) where rank [012] called all_(to_all|gather)", line)


@pytest.mark.slow
@small_and_large
def test_an_absent_peer_is_named_by_the_wait(mpirun, size):
    body = f"""
comm.all_gather(zeros(1), [1] * n)
if me == 1:
    be_absent()
pending = [comm.start(AllGather(zeros({size}), ({size},) * n)) for _ in range(3)]
pending[1].wait()
"""
    result = mpirun(2, script(START + body, timeout=1), timeout=SECONDS, check=False)
    assert result.returncode == 1
    assert "CommunicatorError: all_gather: waited 1 s: nothing came from rank 1" in result.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_during_exchanges_under_way_is_reported(mpirun):
    body = """
first = comm.start(AllGather(zeros(1), (1,) * n))
first.wait()
if me == 1:
    sys.exit(0)
try:  # the error may appear when the second exchange starts
    pending = [comm.start(AllGather(zeros(1), (1,) * n)) for _ in range(2)]
    pending[1].wait()
except CommunicatorError as error:
    say(error)
"""
    result = mpirun(2, script(START + body), timeout=SECONDS, check=False)
    assert said(result) == ["0 all_gather: rank 1 has finished without calling it"]


OF_ONE_JOB["memory_stays_while_what_nobody_waits_for_is_under_way"] = """
import gc, weakref
if me == 1:
    MPI.COMM_WORLD.Barrier()
mine = np.full(4_000_000, me, dtype=np.uint8)
memory = weakref.ref(mine)
comm.start(AllGather(mine, (mine.size,) * n))
del mine
gc.collect()
if me == 0:
    say("kept" if memory() is not None else "freed")
    MPI.COMM_WORLD.Barrier()
# A later exchange completes it, and does not receive its messages.
assert [int(x[0]) for x in comm.all_gather(np.full(3, me + 7, dtype=np.uint8), (3,) * n)] == [7, 8]
while comm._under_way:
    comm._advance()
gc.collect()
say("kept" if memory() is not None else "freed")
"""


def test_memory_of_an_abandoned_exchange_stays_while_it_is_under_way(in_one_job):
    assert in_one_job("memory_stays_while_what_nobody_waits_for_is_under_way") == [
        "0 freed",
        "0 kept",
        "1 freed",
    ]


# --- buffers on a device ---------------------------------------------------------------------------------------------

# A stand-in for CuPy: its arrays are in host memory, so that MPI can read them, but only `get` and `copy` may.
CUPY = """
import contextlib, types
log = []

class DeviceArray(np.ndarray):
    device = contextlib.nullcontext()
    def get(self, out=None):
        log.append("get")
        out = np.empty(self.shape, self.dtype) if out is None else out
        out[...] = np.asarray(self.view(np.ndarray))
        return out

cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
cupyx = types.ModuleType("cupyx")
cupyx.empty_pinned = lambda shape, dtype: log.append("pinned") or np.empty(shape, dtype)
cupy.ndarray, cupy.uint8, cupy.cuda = DeviceArray, np.uint8, cuda
cupy.asarray = lambda x, device=None: log.append("asarray") or np.array(x).view(DeviceArray)
cupy.ascontiguousarray = lambda x: np.ascontiguousarray(x).view(DeviceArray)
cupy.empty = lambda shape, dtype: np.full(shape, 238, dtype=dtype).view(DeviceArray)
cuda.get_current_stream = lambda: types.SimpleNamespace(synchronize=lambda: log.append("synchronize"))
sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupyx": cupyx})
import array_api_compat
from qcomp.comm import buffers
real = buffers.array_namespace
buffers.array_namespace = lambda x: cupy if isinstance(x, DeviceArray) else real(x)
buffers.device = lambda x: None
array_api_compat.is_numpy_array = lambda x: type(x) is np.ndarray
def on_device(size, value):
    return np.full(size, value, dtype=np.uint8).view(DeviceArray)
"""


@pytest.mark.slow
@pytest.mark.parametrize("aware", ["1", "0"])
def test_device_buffers_are_handed_over_or_staged(mpirun, monkeypatch, aware):
    monkeypatch.setenv("QCOMP_CUDA_AWARE_MPI", aware)
    body = """
for size in (0, 5, 200_001):
    log.clear()
    pending = comm.start(AllGather(on_device(size, me), (size,) * n))
    before, received = list(log), pending.wait()
    assert {type(x) for x in received} == {DeviceArray}
    assert all((np.asarray(x) == r).all() and x.size == size for r, x in enumerate(received))
    # A rank may have a device, and another none.
    mixed = on_device(size, me) if me else np.full(size, me, dtype=np.uint8)
    received = comm.all_to_all([mixed] * n, [size] * n)
    assert {type(x) for x in received} == {type(mixed)}
    assert all((np.asarray(x) == r).all() for r, x in enumerate(received))
say(comm.cuda_aware, *before)
"""
    expected = {"1": "True synchronize", "0": "False pinned get"}[aware]
    assert said(mpirun(2, script(START + CUPY + body))) == [f"{rank} {expected}" for rank in range(2)]


def test_an_mpi_without_device_support_says_so_and_bad_settings_are_refused(mpirun, monkeypatch):
    monkeypatch.delenv("QCOMP_CUDA_AWARE_MPI", raising=False)
    body = """
from qcomp.comm import cuda_buffers
own = cuda_buffers.reads_devices(MPI.COMM_WORLD)

class Info(dict):
    Get = dict.get
    Free = lambda self: None

class Comm:
    def __init__(self, **hints):
        self.hints = hints
    def Get_info(self):
        return Info(self.hints)

class Library:
    def __init__(self, path):
        assert path == MPI.__file__
    MPIX_Query_cuda_support = staticmethod(lambda: answer)

asked = lambda kinds=None: cuda_buffers.reads_devices(Comm(**({"mpi_memory_alloc_kinds": kinds} if kinds else {})))
cuda_buffers.ctypes = type("", (), {"CDLL": Library})
found = []
for answer in (0, 1):
    found += [asked(), asked("mpi,system")]
answer = 0
found += [asked("system,cuda:device:host,mpi"), asked("mpi, cuda"), asked("system,rocm:cuda")]
del Library.MPIX_Query_cuda_support  # as in an MPI that has no such function
found.append(asked())
say(own, found)
os.environ["QCOMP_CUDA_AWARE_MPI"] = "yes"
try:
    MPICommunicator(MPI.COMM_SELF)
except ValueError as error:
    say(error)
"""
    assert said(mpirun(1, script(body))) == [
        "0 False [False, False, True, True, True, True, False, False]",
        "0 QCOMP_CUDA_AWARE_MPI is 'yes'; expected '0' or '1'",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("aware", ["", "0"], ids=["as_mpi_says", "staged"])
def test_buffers_of_a_gpu_over_mpi(mpirun, monkeypatch, library, aware):
    pytest.importorskip(library)
    monkeypatch.setenv("QCOMP_CUDA_AWARE_MPI", aware)
    put = {
        "cupy": "import cupy\nput = lambda size, value: cupy.full(size, value, dtype=cupy.uint8)\n",
        "torch": "import torch\nput = lambda size, value: torch.full((size,), value, dtype=torch.uint8).cuda()\n",
    }[library]
    body = """
for size in (0, 5, 5_000_001):
    pending = [comm.start(AllGather(put(size, me + k), (size,) * n)) for k in range(3)]
    for k, exchange in enumerate(pending):
        received = exchange.wait()
        assert {type(x) for x in received} == {type(put(1, 1))}
        assert all(bool((x == r + k).all()) and x.shape == (size,) for r, x in enumerate(received))
say("ok")
"""
    assert said(mpirun(2, script(START + put + body))) == ["0 ok", "1 ok"]
