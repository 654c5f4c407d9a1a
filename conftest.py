"""What pytest must not import where it cannot, and what its tests need of the process."""

import signal
from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["qcomp/backends/torch_triton"]  # it is there for Linux only

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so; tests of interrupts, and their children, need it otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
