"""Codes of a trained model's gradients are near the entropy, lossless, and as long as the page says."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

import gradients
import page

import qcomp
from qcomp.core import coding

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks" / "gradients"
DOCUMENT = json.loads((FOLDER / "gradients.json").read_text())
ROWS = {(r["moment"], r["vector"], r["norm"], r["levels"]): r for r in DOCUMENT["results"]}
with np.load(FOLDER / "sample.npz") as file:
    VECTORS = {(moment, name): x for moment, name, x in gradients.vectors(dict(file))}
QUICK = [(moment, list(gradients.SAMPLE)[-1]) for moment in ("early", "late")]
FIXED = [levels for levels in gradients.LEVELS if levels <= 127]
"""Levels that can be sent without a coder."""
BESIDE = 24
"""Bytes of states and model, which short vectors need in addition to the 2%."""

pytestmark = pytest.mark.timeout(400)  # kernels may have to be compiled first


@pytest.fixture(autouse=True)
def kernels():
    """As the program runs for its users: the pure version of the coders takes ten times as long."""
    with qcomp.backends.use("numba"):
        yield


def signed_levels(x, norm, levels):
    c = gradients.compressor(norm, levels, "range")
    return gradients.levels_of(x, c, c.compress(x, key=gradients.KEY))


def limit(entropy, beside=0):
    return entropy + max(gradients.MOST_OVER * entropy, beside)


def test_the_results_are_complete():
    moments = {"early", "late"}
    names = {gradients.WHOLE, gradients.ALL, *gradients.SAMPLE}
    expected = {
        (m, n, norm, s) for m in moments for n in names for norm in ("max", "l2") for s in gradients.LEVELS
    }
    assert ROWS.keys() == expected
    assert len(DOCUMENT["results"]) == len(expected)
    assert VECTORS.keys() == {(m, n) for m in moments for n in names - {gradients.WHOLE}}
    assert min(r["elements"] for r in ROWS.values() if r["vector"] == gradients.WHOLE) > 800_000
    assert DOCUMENT["steps"]["late"] >= 100 * DOCUMENT["steps"]["early"] / 10 >= 100


@pytest.mark.parametrize(
    "key",
    [pytest.param(k, marks=[] if k in QUICK else [pytest.mark.exhaustive]) for k in VECTORS],
    ids=" ".join,
)
def test_coding_the_sample_gives_the_recorded_lengths(key):
    """On any machine: levels and signs, and so the bytes of all codes, are the same."""
    x = VECTORS[key]
    for norm in gradients.NORMS:
        for levels in gradients.LEVELS:
            row = ROWS[(*key, norm, levels)]
            assert row["elements"] == x.size
            assert gradients.measured(x, norm, levels) == {name: row[name] for name in ("codes", "payloads")}


@pytest.mark.parametrize("moment", ["early", "late"])
@pytest.mark.parametrize("name", [gradients.WHOLE, gradients.ALL])
def test_a_gradient_as_one_vector_takes_its_entropy(name, moment):
    """Within 2%, also with 1000 levels; the lengths of the sample's codes were checked above."""
    for norm in gradients.NORMS:
        for levels in gradients.LEVELS:
            codes = ROWS[moment, name, norm, levels]["codes"]
            assert codes["range"] <= limit(codes["entropy"])


@pytest.mark.parametrize("name", gradients.SAMPLE)
def test_a_tensor_takes_its_entropy_and_some_bytes(name):
    for (_, vector, norm, levels), row in ROWS.items():
        if vector == name and levels in FIXED:
            codes = row["codes"]
            assert codes["range"] <= limit(codes["entropy"], BESIDE)
            if row["elements"] >= 8192 and (norm, levels) != ("l2", 1):
                assert codes["range"] <= limit(codes["entropy"])


def test_no_other_code_is_within_the_bounds():
    """Else the bounds would prove nothing: fixed width never is, Elias codes never are for a gradient as one vector."""
    for row in ROWS.values():
        codes = row["codes"]
        if row["vector"] == gradients.WHOLE:
            assert min(codes["fixed"], codes["sparse"], codes["dense"]) > limit(codes["entropy"], BESIDE)


def test_no_payload_exceeds_fixed_width_by_more_than_its_header():
    for row in ROWS.values():
        fixed = row["payloads"]["fixed"]
        assert max(row["payloads"][name] for name in coding.CODINGS) <= fixed + 1
    # This needs the fallback for codes that would not be shorter: Elias codes alone are sometimes longer.
    assert any(min(r["codes"]["sparse"], r["codes"]["dense"]) > r["codes"]["fixed"] for r in ROWS.values())


@pytest.mark.parametrize("name", gradients.SAMPLE)
@pytest.mark.parametrize("norm", ["max", pytest.param("l2", marks=pytest.mark.exhaustive)])
def test_no_code_loses_anything(norm, name):
    """A payload decodes to the bytes that fixed width gives, whatever its coding."""
    x = VECTORS["late", name]
    for levels in gradients.LEVELS:
        coded = [gradients.compressor(norm, levels, coder) for coder in coding.CODINGS]
        results = {
            c.decompress(c.compress(x, key=gradients.KEY), like=x).tobytes()
            for c in (gradients.plain(coded[0]), *coded)
        }
        assert len(results) == 1


def test_pure_loops_write_the_same_codes():
    x = VECTORS["late", "token_embedding.weight"][8192:28672]
    vector = gradients.as_bytes(signed_levels(x, "max", 7))
    codes = {}
    for kernels in ("pure", "numba"):
        with qcomp.backends.use(kernels):
            codes[kernels] = [coding.encode(n, *vector, largest=7) for n in coding.CODINGS]
    assert codes["pure"] == codes["numba"]


def test_lengths_by_hand():
    signed = np.asarray([0, -1, 0, 3])
    assert gradients.entropy(signed) == pytest.approx(-0.5 * math.log2(0.5) - 0.5 * math.log2(0.25) + 0.5)
    # See the examples of qcomp.core.coding.qsgd_codes: 13 and 15 bits after one byte.
    assert gradients.elias_bytes(np.abs(signed)) == {"dense": 3, "sparse": 3}
    code = coding.encode("elias", *gradients.as_bytes(signed), largest=3)
    assert len(code) == 3


def test_length_formulas_agree_with_the_coder_of_the_paper():
    for name in ("token_embedding.weight", "final_norm.weight"):
        for levels in gradients.LEVELS:
            signed = signed_levels(VECTORS["early", name], "l2", levels)
            code = coding.encode("elias", *gradients.as_bytes(signed), largest=levels)
            assert len(code) == min(gradients.elias_bytes(np.abs(signed)).values())


def test_the_page_shows_the_committed_numbers():
    text = (FOLDER / page.PAGE).read_text()
    assert page.replaced(text, gradients.blocks(DOCUMENT)) == text


def test_the_sample_is_small():
    assert (FOLDER / "sample.npz").stat().st_size < 600_000


@pytest.mark.exhaustive
def test_the_program_runs(run_program, monkeypatch, tmp_path):
    monkeypatch.setattr(gradients, "LEVELS", (127,))
    (tmp_path / page.PAGE).write_text(
        "".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in gradients.blocks(DOCUMENT))
    )
    folder = run_program(gradients, "--steps", "1")
    document = json.loads((folder / "gradients.json").read_text())
    assert document["steps"] == {"early": 0, "late": 1}
    assert len(document["results"]) == 2 * (2 + len(gradients.SAMPLE)) * 2
    with np.load(folder / "sample.npz") as file:
        kept = dict(file)
    assert kept.keys() == {f"{moment}/{name}" for moment in ("early", "late") for name in gradients.SAMPLE}
    assert kept["early/head.weight"].shape == (64, 128)
    assert not np.array_equal(kept["early/head.weight"], kept["late/head.weight"])
    assert (folder / "gradients.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / page.PAGE).read_text()
    assert all(block in text for block in gradients.blocks(document).values())
    assert run_program(gradients, "--table")
    assert (folder / page.PAGE).read_text() == text
