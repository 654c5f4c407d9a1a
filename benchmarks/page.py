"""Writes the tables of docs/benchmarks/README.md from the JSON files, so that the page cannot disagree with them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "cell", "made", "rewrite", "table"]

PAGE = "README.md"
FEWEST_ROUNDS = 7


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(spread: Mapping[str, Any] | None) -> str:
    """Return the median and the quartiles of `timing.spread`, or nothing."""
    if spread is None:
        return ""
    low, high = spread["quartiles"]
    return f"{number(spread['median'])} ({number(low)} to {number(high)})"


def number(value: float) -> str:
    """Return a number with three digits and no exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def made(document: Mapping[str, Any]) -> str:
    """Return a sentence about the machine and the number of rounds of a document."""
    words = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    trial = "" if document["rounds"] >= FEWEST_ROUNDS else "**A trial: too few rounds to mean anything.** "
    return f"{trial}Medians (quartiles) of {document['rounds']} rounds; {words}."


def rewrite(folder: Path, blocks: Mapping[str, str]) -> None:
    """Replace the text between the markers of each block on the folder's page, if the folder has a page."""
    path = folder / PAGE
    if path.exists():
        path.write_text(replaced(path.read_text(), blocks))


def replaced(text: str, blocks: Mapping[str, str]) -> str:
    """Return a page with the blocks of these names replaced.

    Raises
    ------
    ValueError
        If the page lacks the markers of a block.
    """
    for name, content in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no block {name!r}; expected {begin.strip()} and {end}")
        text = f"{before}{begin}{content}\n{end}{after}"
    return text
