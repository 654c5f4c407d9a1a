"""The length of coded gradients of a trained model, compared with their entropy.

    python benchmarks/gradients.py

Trains the language model of the demo with exact Adam in one process, and takes an early and a late gradient. QSGD
rounds each gradient as one vector, and some of its tensors, each alone and all together. These tensors are saved in
sample.npz, from which a test recomputes the lengths of their codes. Writes gradients.json, gradients.png and the tables
of README.md.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import page
import torch
from convergence.language_model import LanguageModelTask
from convergence.methods import BASELINE, METHODS
from matplotlib.figure import Figure
from tqdm import tqdm

import qcomp
from qcomp.core import coding
from qcomp.core.coding import elias

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

LEVELS = (1, 7, 15, 127, 1000)
NORMS = ("max", "l2")
BUCKET = 512
KEY = qcomp.Key(seed=0)
EARLY = 10
"""Steps before the first of the two gradients."""
THREADS = 1
SAMPLE = {
    "token_embedding.weight": slice(None),
    "blocks.1.attention_out.weight": slice(None),
    "blocks.1.mlp_in.weight": slice(128),
    "blocks.1.mlp_out.weight": slice(32),
    "head.weight": slice(64, 128),
    "final_norm.weight": slice(None),
}
"""The saved tensors, and which of their rows are saved."""
WHOLE, ALL = "the whole gradient", "the sample as one vector"
CODES = {
    "fixed": "fixed width",
    "sparse": "Elias, sparse",
    "dense": "Elias, dense",
    "range": "range coder",
    "entropy": "entropy",
}
STYLES = {"fixed": "black", "sparse": "#e0962b", "dense": "#3d9970", "range": "#d1495b", "entropy": "#2e86ab"}
MOST_OVER = 0.02
"""The accepted excess of the range coder over the entropy."""


def main() -> None:
    """Train, code, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks/gradients"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="before the late gradient (default: %(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only draw and write the tables, from the JSON")
    options = parser.parse_args()
    path = options.out / "gradients.json"
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(THREADS)
        moments = {"early": min(EARLY, options.steps - 1), "late": options.steps}
        gradients = train(moments)
        np.savez_compressed(options.out / "sample.npz", **sample(gradients))
        document = {"steps": moments, "results": measure(gradients)}
        path.write_text(json.dumps(document, indent=1) + "\n")
    document = json.loads(path.read_text())
    picture(document).savefig(options.out / "gradients.png", dpi=120)
    page.rewrite(options.out, blocks(document))


def train(moments: Mapping[str, int]) -> dict[str, dict[str, Floats]]:
    """Return all tensors of the gradient at each moment; ``moments`` has the completed steps of each."""
    task, last = LanguageModelTask(seed=0, rank=0), max(moments.values())
    ((name, network),) = task.networks.items()
    own, comm = list(network.parameters()), qcomp.comm.LocalCommunicator.alone()
    parameters = [p.detach() for p in own]
    optimizer = METHODS[BASELINE].optimizer(task, last)
    state = optimizer.init(parameters, comm)
    found: dict[str, dict[str, Floats]] = {}
    for step in tqdm(range(last + 1), desc="training", unit="step", mininterval=1):
        gradients = list(torch.autograd.grad(task.loss(name, step), own))
        for moment, steps in moments.items():
            if step == steps:
                tensors = zip(network.named_parameters(), gradients, strict=True)
                found[moment] = {key: gradient.numpy().copy() for (key, _), gradient in tensors}
        moved, state = optimizer.step(parameters, gradients, state, comm)
        for p, new in zip(parameters, moved, strict=True):
            p.copy_(new)
    return found


def sample(gradients: Mapping[str, Mapping[str, Floats]]) -> dict[str, Any]:
    """Return the saved rows, named by moment and tensor."""
    return {
        f"{moment}/{name}": tensors[name][rows]
        for moment, tensors in gradients.items()
        for name, rows in SAMPLE.items()
    }


def measure(gradients: Mapping[str, Mapping[str, Floats]]) -> list[dict[str, Any]]:
    """Return a row for each moment, vector, norm and number of levels."""
    whole = [(moment, WHOLE, joined(tensors)) for moment, tensors in gradients.items()]
    return lengths([*whole, *vectors(sample(gradients))])


def vectors(kept: Mapping[str, Floats]) -> list[tuple[str, str, Floats]]:
    """Return the vectors of a sample with moments and names: for each moment all tensors together, then each."""
    moments: dict[str, dict[str, Floats]] = {}
    for key, tensor in kept.items():
        moment, _, name = key.partition("/")
        moments.setdefault(moment, {})[name] = tensor
    return [
        (moment, name, x)
        for moment, tensors in moments.items()
        for name, x in {ALL: joined(tensors), **{n: t.ravel() for n, t in tensors.items()}}.items()
    ]


def joined(tensors: Mapping[str, Floats]) -> Floats:
    """Return all tensors as one vector."""
    return np.concatenate([tensor.ravel() for tensor in tensors.values()])


def lengths(cases: list[tuple[str, str, Floats]]) -> list[dict[str, Any]]:
    """Return a row for each vector, norm and number of levels."""
    rows = []
    for moment, name, x in tqdm(cases, desc="coding", unit="vector"):
        row = {"moment": moment, "vector": name, "elements": x.size, "zeros": float(np.mean(x == 0))}
        rows += [
            row | {"norm": norm, "levels": count} | measured(x, norm, count)
            for norm in NORMS
            for count in LEVELS
        ]
    return rows


def measured(x: Floats, norm: str, count: int) -> dict[str, Any]:
    """Return the bytes of each code of a vector, the bytes of its entropy, and the bytes of whole payloads."""
    coded = {code: compressor(norm, count, code) for code in coding.CODINGS}
    sent = {code: c.compress(x, key=KEY) for code, c in coded.items()}
    signed = levels_of(x, coded["range"], sent["range"])
    payloads = {code: payload.nbytes for code, payload in sent.items()}
    payloads["fixed"] = plain(coded["range"]).payload_spec(x.size).nbytes
    codes: dict[str, float] = {**elias_bytes(np.abs(signed))}
    codes["fixed"] = payloads["fixed"] - 4 * -(-x.size // BUCKET)
    codes["range"] = len(coding.encode("range", *as_bytes(signed), largest=count))
    codes["entropy"] = round(entropy(signed) * x.size / 8, 3)
    return {"codes": codes, "payloads": payloads}


def compressor(norm: str, count: int, code: str) -> qcomp.Compressor:
    """Return QSGD with a coder."""
    return qcomp.compressor(f"qsgd:levels={count},bucket_size={BUCKET},norm={norm},coding={code}")


def plain(c: qcomp.Compressor) -> qcomp.Compressor:
    """Return the compressor with the same values in codes of fixed width."""
    assert c.coder is not None
    assert isinstance(c.coder.plain, qcomp.Compressor)
    return c.coder.plain


def levels_of(x: Floats, c: qcomp.Compressor, payload: qcomp.Payload) -> Integers:
    """Return the signed levels that a vector was rounded to."""
    step = c.payload_spec(x.size).split(payload.data)["step"]
    # The product of a level and a step is exact.
    each = np.repeat(np.where(step > 0, step, 1), BUCKET)[: x.size]
    levels: Integers = np.rint(c.decompress(payload, like=x) / each).astype(np.int64)
    return levels


def as_bytes(signed: Integers) -> tuple[bytes, bytes]:
    """Return levels and signs as coders take them."""
    return np.abs(signed).astype("<u2").tobytes(), (signed < 0).astype(np.uint8).tobytes()


def elias_bytes(levels: Integers) -> dict[str, int]:
    """Return the bytes of both codes of the paper, of which `coding.encode` returns the shorter."""
    (at,) = np.nonzero(levels)
    signs = at.size
    dense = omega_bits(levels + 1) + signs
    sparse = omega_bits(np.asarray([signs + 1])) + omega_bits(np.diff(at, prepend=-1)) + signs
    sparse += omega_bits(levels[at])
    return {"sparse": 1 + -(-sparse // 8), "dense": 1 + -(-dense // 8)}


def omega_bits(numbers: Integers) -> int:
    """Return the bits of the omega codewords of all these numbers."""
    values, counts = np.unique(numbers, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return sum(elias.length(value) * count for value, count in pairs)


def entropy(signed: Integers) -> float:
    """Return the entropy of the magnitudes in bits per element, plus a bit for each sign."""
    counts = np.bincount(np.abs(signed))
    share = counts[counts > 0] / signed.size
    return float(-np.sum(share * np.log2(share)) + np.mean(signed != 0))


def over(row: Mapping[str, Any]) -> float:
    """Return the relative excess of the range coder over the entropy."""
    return float(row["codes"]["range"] / row["codes"]["entropy"] - 1)


def bits(row: Mapping[str, Any], code: str) -> float:
    """Return the bits per element of a code."""
    return float(8 * row["codes"][code] / row["elements"])


def blocks(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the page made from these results."""
    rows = document["results"]
    return {
        "whole": all_codes([row for row in rows if row["vector"] == WHOLE]),
        "one vector": all_codes([row for row in rows if row["vector"] == ALL]),
        "tensors": each_tensor([row for row in rows if row["vector"] not in (WHOLE, ALL)]),
    }


def all_codes(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each row."""
    lines = [
        [row["moment"], row["norm"], str(row["levels"])]
        + [f"{bits(row, code):.3f}" for code in CODES]
        + [percent(row)]
        for row in rows
    ]
    head = ["gradient", "norm", "levels", *CODES.values(), "range coder over entropy"]
    return f"Bits an element; {rows[0]['elements']:,} elements.\n\n{page.table(head, lines)}"


def each_tensor(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each tensor, moment and norm, and a column for each number of levels."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        key = (row["moment"], row["vector"], f"{row['elements']:,}", f"{row['zeros']:.0%}", row["norm"])
        lines.setdefault(key, []).append(cell(row))
    head = [
        "gradient",
        "tensor",
        "elements",
        "zeros",
        "norm",
        "1 level",
        *(f"{count} levels" for count in LEVELS[1:]),
    ]
    return page.table(head, [[*key, *cells] for key, cells in lines.items()])


def cell(row: Mapping[str, Any]) -> str:
    """Return the bits of the range coder, its excess in bytes if too large, and any shorter code."""
    codes, remarks = row["codes"], [percent(row)]
    if over(row) > MOST_OVER:
        remarks.append(f"{codes['range'] - codes['entropy']:.0f} bytes")
    remarks += [
        f"{CODES[code]}: {bits(row, code):.3f}"
        for code in ("sparse", "dense")
        if codes[code] < codes["range"]
    ]
    return f"{bits(row, 'range'):.3f} ({'; '.join(remarks)})"


def percent(row: Mapping[str, Any]) -> str:
    """Return the excess of the range coder over the entropy, in bold if too large."""
    text = f"{over(row):+.2%}"
    return text if over(row) <= MOST_OVER else f"**{text}**"


def picture(document: Mapping[str, Any]) -> Figure:
    """Return bits per element against levels, for the whole gradient at the end of training."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(NORMS), sharey=True)
    for panel, norm in zip(panels, NORMS, strict=True):
        rows = [
            row
            for row in document["results"]
            if (row["moment"], row["vector"], row["norm"]) == ("late", WHOLE, norm)
        ]
        for code, label in CODES.items():
            panel.plot(
                [row["levels"] for row in rows],
                [bits(row, code) for row in rows],
                ":" if code == "entropy" else "-",
                color=STYLES[code],
                marker="o",
                ms=4,
                lw=3 if code == "entropy" else 1.5,
                label=label,
            )
        panel.set(xscale="log", xlabel="levels", title=f"{norm} norm, buckets of {BUCKET}")
        panel.set_xticks(LEVELS, [str(count) for count in LEVELS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bits an element")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    main()
