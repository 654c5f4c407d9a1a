"""``python -m tests.fuzz --seconds 60``: tries new inputs on all targets, in turns, until the time is over."""

import argparse
import itertools
import sys
import time
import warnings

from tests.fuzz.fuzzing import Report, fuzz
from tests.fuzz.targets import TARGETS

AT_ONCE = 100


def turns(first):
    """Yield the number of the first input, and the target, of each turn."""
    for number in itertools.count(first, AT_ONCE):
        for target in TARGETS:
            yield number, target


def main():
    """Run and report; return 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="(default: %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first input (default: %(default)s)"
    )
    options = parser.parse_args()
    warnings.simplefilter("error")
    end, report = time.monotonic() + options.seconds, Report()
    for first, target in turns(options.first):
        report.add(fuzz(target, range(first, first + AT_ONCE)))
        if time.monotonic() > end or len(report.faults) > AT_ONCE:
            break
    sys.stdout.write(f"{report}\n")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
