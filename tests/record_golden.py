"""Writes the golden files, and says in words what has changed: ``python -m tests.record_golden``.

A saved state that is in the file of this version stays there as it is: users have such states. What follows it is
recorded anew. Payloads, states and names have a folder for each version; `tests.releases` says when it may be written.
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

os.environ["QCOMP_KERNELS"] = "pure"

from qcomp.version import __version__
from tests import releases
from tests.golden.jobs import CASES, continued, run
from tests.golden.names import FRAMEWORKS, described

FOLDER = Path(__file__).parent / "golden"
TRAJECTORIES = [f"{name}, 3 ranks" for name in ("Adam", "Lion", "LAMB", "1-bit, two_phase", "QAdam, ring")]
TRAJECTORIES += [f"{name}, two_phase, 3 ranks" for name in ("1-bit LAMB", "0/1", "SGD", "MuLoCo")]
TRAJECTORIES += ["Muon, 3 ranks"]
FIRST = {
    (type(maker), case.partition(",")[0]): case
    for case, (maker, size) in reversed(CASES.items())
    if size == 2
}
STATES = sorted(FIRST.values())
"""One case of each optimizer and loop, whose states are kept."""
OF_VERSIONS = ("names", "payloads", "states")
"""The files that each version has in a folder of its own."""
MOST = 4
"""Parts of a line whose differences are told one by one."""


@cache
def read(file: str) -> Any:
    """Return the content of a golden file of this version."""
    path = releases.newest(file) if file in OF_VERSIONS else FOLDER / f"{file}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _states() -> dict[str, Any]:
    of_this = read("states") if releases.newest("states").parent.name == __version__ else {}
    found = {}
    for case in STATES:
        new = json.loads(json.dumps(run(case)[2]))
        old = of_this.get(case, {})
        saved = old.get("saved") or new
        found[case] = {"saved": saved, "then": continued(case, saved)}
        if saved != new and found[case] != old:
            print(f"states: {case}: `saved` is of an earlier run; delete its entry if it was never released")
    return found


def _names() -> dict[str, Any]:
    roots = [f"qcomp.{name}" for name in FRAMEWORKS]
    return {module: names for root in ["qcomp", *roots] for module, names in described(root).items()}


def _payloads() -> dict[str, Any]:
    from tests.core.test_payload import golden_records

    return golden_records()


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "messages": lambda: {case: run(case)[0] for case in CASES},
    "parameters": lambda: {case: run(case)[1] for case in TRAJECTORIES},
    "states": _states,
    "names": _names,
    "payloads": _payloads,
}


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield a sentence for each difference between two contents of a golden file."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if key not in new:
                yield f"{where}{key}: is gone"
            elif key not in old:
                yield f"{where}{key}: is new"
            else:
                yield from differences(old[key], new[key], f"{where}{key}: ")
        return
    if isinstance(old, str) and isinstance(new, str):
        parts = zip_longest(old.split(" | "), new.split(" | "), fillvalue="nothing")
        pairs = [(was, now) for was, now in parts if was != now]
        more = f"{len(pairs)} values, the first " if len(pairs) > MOST else ""
        for was, now in pairs[:1] if more else pairs:
            yield f"{where}{more}was {was}, is {now}"
    else:
        yield f"{where}was {old}, is {new}"


def main() -> None:
    """Write every file whose content has changed."""
    for file, record in FILES.items():
        old, new = read(file), record()
        for line in differences(old, new):
            print(f"{file}: {line}")
        if new != old:
            path = releases.to_write(file) if file in OF_VERSIONS else FOLDER / f"{file}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
