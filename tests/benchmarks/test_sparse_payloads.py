"""The benchmark of sparse payloads runs from start to end, and its page shows its numbers."""

import json
from pathlib import Path

import page
import pytest
import sparse_payloads as sparse

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "sparse"


def test_sparse(run_program, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse, "ROUNDS", (1, 2))
    (tmp_path / page.PAGE).write_text((PAGE / page.PAGE).read_text())
    folder = run_program(sparse, "--buckets", "4")
    document = json.loads((folder / "sparse.json").read_text())
    assert len(document["lengths"]) == 3 * len(sparse.BITS)
    for row in document["lengths"]:
        assert 0 <= row["of_rounding"] < row["error"] < 1
        assert row["bits"] + 6.2 < row["per_entry"]
    text = (folder / page.PAGE).read_text()
    assert all(block in text for block in sparse.blocks(document).values())


def test_the_page_shows_the_committed_numbers():
    document = json.loads((PAGE / "sparse.json").read_text())
    text = (PAGE / page.PAGE).read_text()
    assert all(block in text for block in sparse.blocks(document).values())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_committed_lengths_are_those_of_this_version(bits):
    document = json.loads((PAGE / "sparse.json").read_text())
    sample = sparse.vectors(PAGE.parent / "gradients" / "sample.npz", 1)[sparse.GRADIENTS]
    payloads = [sparse.qcomp.TopK(sparse.K, sparse.BUCKET, bits).compress(x) for x in sample]
    kept = sum(
        sparse.np.count_nonzero(sparse.qcomp.compressor(p.compressor).decompress(p, like=x))
        for p, x in zip(payloads, sample, strict=True)
    )
    (row,) = [r for r in document["lengths"] if (r["kind"], r["bits"]) == (sparse.GRADIENTS, bits)]
    assert row["per_entry"] == 8 * sum(p.nbytes for p in payloads) / kept
