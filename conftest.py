"""What pytest must not import where it cannot: Triton is there for Linux only."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["qcomp/backends/torch_triton"]
