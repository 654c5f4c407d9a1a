"""Training runs, read from their logs: what each measured, by step."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Run", "read_runs"]

_LOSS = "validation_loss"


@dataclass
class Run:
    """A run: its name, single figures, and series of (step, value)."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, step: float, value: Any) -> None:
        """Add a point to a series, if the value is a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        try:
            number = float(value)
        except OverflowError:  # an integer beyond all floats
            number = math.inf if value > 0 else -math.inf
        self.series.setdefault(name, []).append((float(step), number))


def read_runs(path: Path) -> list[Run]:
    """Return the runs in a file or a folder.

    It reads JSON lines with a dict for each step, such as the reports of `qcomp.Diagnostics`; ``summary.json`` and
    ``curves.json`` of ``examples/train_lm.py``, and the folder that holds them; and runs of the convergence study.

    Raises
    ------
    ValueError
        If a file is none of these.
    OSError
        If it cannot be read.
    """
    if path.is_dir():
        files = [path / name for name in ("summary.json", "curves.json")]
        files = [file for file in files if file.exists()] or sorted(
            (*path.glob("*.json"), *path.glob("*.jsonl"))
        )
        if not files:
            raise ValueError(f"{path} has no summary.json, curves.json or other logs")
        return _merged([run for file in files for run in _read_file(file, may_be_empty=True)])
    return _read_file(path)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Merge what several files contain about one run."""
    found: dict[str, Run] = {}
    for run in runs:
        known = found.setdefault(run.name, Run(run.name))
        known.figures |= run.figures
        known.series |= run.series
    return list(found.values())


def _read_file(path: Path, *, may_be_empty: bool = False) -> list[Run]:
    """Return the runs in a file, which in a folder may still be empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error
    if may_be_empty and not text.strip():
        return [Run(path.stem)]
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return [_of_lines(path, text)]
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
        raise ValueError(f"{path} is no log of a run: {error}") from error
    if isinstance(document, dict) and "curve" in document:
        return [_of_study(path, document)]
    if isinstance(document, dict):
        return [_of_lines(path, json.dumps(document))]
    if isinstance(document, list) and document and all(isinstance(entry, dict) for entry in document):
        if all("optimizer" in entry for entry in document):
            return [_of_example(path, entry) for entry in document]
        return [_of_lines(path, "\n".join(map(json.dumps, document)))]
    raise ValueError(f"{path} is JSON, but no log of a run; expected a dict for each step, or a list of runs")


def _of_lines(path: Path, text: str) -> Run:
    """Return the run of a file with a dict for each step; dicts without a "step" are numbered.

    An incomplete last line, as in the log of a running job, is ignored.
    """
    run = Run(path.stem)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for count, (number, line) in enumerate(lines):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if 0 < count == len(lines) - 1 and line.startswith("{") and not text.endswith("\n"):
                break
            raise ValueError(
                f"{path}, line {number}: {error.msg}; expected a JSON dict for each step"
            ) from error
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON dict for each step")
        step = entry.get("step", count)
        if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
            raise ValueError(f"{path}, line {number}: step is {step!r}; expected a number")
        for name, value in _flat(entry):
            if name != "step":
                run.add(name, step, value)
    if not run.series:
        empty = "" if lines else ", since it is empty"
        raise ValueError(f"{path} has no numbers by step{empty}; expected a JSON dict for each step")
    return run


def _flat(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _of_study(path: Path, document: Mapping[str, Any]) -> Run:
    """Return a run of the convergence study."""
    names = [str(document[key]) for key in ("task", "method", "seed") if key in document]
    run = Run(" ".join(names) or path.stem)
    run.figures = {key: value for key, value in document.items() if not isinstance(value, list | dict)}
    try:
        for step, value in document["curve"]:
            run.add(_LOSS, step, value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: curve is {document['curve']!r}; expected a list of [step, value]"
        ) from error
    return run


def _of_example(path: Path, entry: Mapping[str, Any]) -> Run:
    """Return a run of the example: an entry of its summary or of its curves."""
    run = Run(str(entry["optimizer"]))
    for name, value in entry.items():
        if name in ("validation", "diagnostics"):
            try:
                for point in value:
                    step = point["step"]
                    named = {_LOSS: point["loss"]} if name == "validation" else point
                    for key, number in named.items():
                        if key != "step":
                            run.add(key, step, number)
            except (KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}: {name} of {run.name}; expected points with a step and a loss"
                ) from error
        elif isinstance(value, list):
            for step, number in enumerate(value, start=1):
                run.add(name, step, number)
        elif name != "optimizer":
            run.figures[name] = value
    return run
