"""Forks ranks from a process that has already imported torch, which saves each rank of each job that import.

Its arguments are names of further modules to import. It reads one job per line of standard input, and answers with the
exit status of each rank, as `subprocess.Popen.returncode` has it.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time

import numpy  # noqa: F401
import torch

import qcomp.comm.torch_dist
import qcomp.comm.torch_launch  # noqa: F401


def become_rank(rank, job):
    for descriptor, path in ((0, os.devnull), (1, job["out"][rank]), (2, job["err"][rank])):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.environ.update(job["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    code = compile(job["code"], "<rank>", "exec")
    if job["whole_exit"]:
        exec(code, {"__name__": "__main__"})
        sys.exit()
    # Taking all of torch down takes half a second; a few tests check whether that can hang.
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as leaving:
        status = leaving.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    for module in sys.argv[1:]:
        importlib.import_module(module)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        running, statuses = {}, {}
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, job)
            running[pid] = rank
        deadline = time.monotonic() + job["timeout"]
        while running:
            left = deadline - time.monotonic()
            if left <= 0:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
            # One SIGCHLD may stand for several children, so this asks for each of them.
            signal.sigtimedwait([signal.SIGCHLD], max(left, 0.05))
            for pid in tuple(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    rank = running.pop(pid)
                    statuses[rank] = os.waitstatus_to_exitcode(status) if left > 0 else "late"
        sys.stdout.write(json.dumps([statuses[rank] for rank in range(job["ranks"])]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":  # pytest also imports this file, to look for doctests
    main()
