"""The benchmarks run from start to end at tiny sizes and write what they should; times are not checked."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import baselines
import cases
import comparisons
import gpu
import inner_states
import kernels
import overhead
import planning_rates
import startup
import timing
import torch_optimizers

pytestmark = pytest.mark.timeout(400)  # kernels may have to be compiled first

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "README.md"


def is_spread(value):
    low, high = value["quartiles"]
    return low <= value["median"] <= high


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_kernels(run_program, tmp_path):
    (tmp_path / "README.md").write_text(PAGE.read_text())
    folder = run_program(kernels, "--rounds", "2", "--largest", "10")
    document = json.loads((folder / "kernels.json").read_text())
    assert set(document) == {"machine", "rounds", "results", "comparisons", "threads"}
    timed = {(r["subject"], r["what"], r["kernels"], r["arrays"]) for r in document["results"]}
    for subject in cases.COMPRESSORS:
        for what in [*cases.ENCODES, *cases.DECODES]:
            for kind in cases.KINDS:
                assert (subject, what, *kind) in timed
    assert all(r["elements"] == 1 << 10 and is_spread(r["over_copy"]) for r in document["results"])
    assert {r["what"] for r in document["results"] if "over_fresh_copy" in r} == set(cases.FRESH)
    assert all(is_spread(r["over_two_threads"]) for r in document["threads"])
    assert {r["task"] for r in document["comparisons"]} == set(comparisons.TASKS)
    assert is_picture(folder / "kernels.png")
    assert is_picture(folder / "comparisons.png")
    text = (folder / "README.md").read_text()
    assert all(block in text for block in kernels.blocks(document).values())
    (folder / "README.md").write_text(PAGE.read_text())
    assert run_program(kernels, "--table")
    assert (folder / "README.md").read_text() == text


@pytest.mark.parametrize("as_array", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("subject", cases.COMPRESSORS)
def test_cases_labelled_as_kernels_have_kernels(subject, as_array):
    x = as_array(np.ones(1000, dtype=np.float32))
    assert cases.has_kernels(cases.COMPRESSORS[subject], "numba", x)
    assert not cases.has_kernels(cases.COMPRESSORS[subject], "numba", as_array(np.ones(1000, dtype=np.int32)))


def test_other_packages_are_compared_where_they_are_installed(monkeypatch):
    vectors = cases.Vectors.draw(4096)
    monkeypatch.setattr(baselines, "block_quantizer", lambda: None)
    without = {c.row["by"] for c in comparisons.comparisons(vectors)}

    class Quantizer:
        def quantize_blockwise(self, x, *, blocksize):
            assert isinstance(x, torch.Tensor)
            return x.to(torch.int8), blocksize

        def dequantize_blockwise(self, codes, blocksize):
            return codes.float()

    monkeypatch.setattr(baselines, "block_quantizer", Quantizer)
    found = comparisons.comparisons(vectors)
    assert {c.row["by"] for c in found} - without == {"bitsandbytes, blockwise"}
    for candidate in found:
        candidate.time()


@pytest.mark.parametrize("kernels_name", ["pure", "numba"])
def test_repeated_calls_do_not_let_values_grow(kernels_name):
    vectors = cases.Vectors.draw(1000)
    with cases.under(kernels_name)():
        for compressor in [*cases.COMPRESSORS.values(), None]:
            for call in cases.calls_of(compressor, vectors).values():
                for _ in range(30):
                    call()
    assert max(np.max(np.abs(v)) for v in (vectors.residual, vectors.out)) < 5e5


def test_overhead(run_program, monkeypatch):
    start = {"import numpy": {"median": 0.2, "quartiles": [0.1, 0.3]}}
    monkeypatch.setattr(startup, "measure", lambda _: start)
    monkeypatch.setattr(overhead, "LEAST_SECONDS", 0)
    folder = run_program(overhead, "--rounds", "2")
    document = json.loads((folder / "overhead.json").read_text())
    assert document["startup"] == start
    rows = {(r["subject"], r["what"], r["elements"]): r for r in document["results"]}
    assert len(rows) == len(document["results"]) == len(cases.COMPRESSORS) * 2 * len(overhead.SIZES)
    assert all(is_spread(r["call_us"]) and is_spread(r["overhead_us"]) for r in rows.values())
    assert is_picture(folder / "overhead.png")


def test_the_overhead_is_the_time_that_does_not_depend_on_size():
    def seconds(size):
        return [3e-6 + 1e-9 * size] * 2

    sizes = (100, *overhead.ANCHORS)
    row = overhead.result({("c", "w", size): seconds(size) for size in sizes}, ("c", "w", 100))
    assert row["overhead_us"]["median"] == pytest.approx(3)
    assert row["call_us"]["median"] == pytest.approx(3.1)


def test_a_process_reports_the_times_of_its_start():
    assert set(startup.one_process()) == {
        "import numpy",
        "import qcomp",
        "import the kernels, and numba",
        "first compress, sign",
        "first decompress, sign",
        "first compress, qsgd",
        "first decompress, qsgd",
    }


def test_gpu_dry_run(run_program):
    folder = run_program(gpu, "--dry-run")
    document = json.loads((folder / "gpu.json").read_text())
    assert "dry run" in document["machine"]["device"]
    for row in document["results"]:
        assert row["bytes"] > 4 * row["elements"]
        assert row["bytes_per_second"] > 0
        assert is_spread(row["over_copy"])
    found = {(row["subject"], row["what"]) for row in document["results"]}
    assert found == {(s, w) for s in gpu.SUBJECTS for w in gpu.FLOATS} | {
        (gpu.DEEPSPEED, gpu.WITH_FEEDBACK),
        (gpu.DEEPSPEED, gpu.DECODE),
    }
    assert is_picture(folder / "gpu.png")


def test_planning_rates_times_lloyd_max_alone(run_program, monkeypatch, tmp_path):
    monkeypatch.setattr(planning_rates, "RATIO_ROUNDS", {"numba": 2, "pure": 2})
    (tmp_path / "rates.json").write_text('{"product": 1e-11}')
    folder = run_program(planning_rates, "--ratios", "--elements", "4096")
    document = json.loads((folder / "rates.json").read_text())
    assert document["product"] == 1e-11
    for found in document["lloyd_max"]["ratios"].values():
        assert list(found) == [c.spec for c in planning_rates.NEAREST]
        for fields in found.values():
            assert set(fields) == {"encode", "decode", "add"}
            assert all(is_spread(ratio) for ratio in fields.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_without_a_device_is_status_2(run_program, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        run_program(gpu)
    assert ended.value.code == 2
    assert "torch finds no CUDA device; --dry-run runs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_torch_optimizer(run_program, tmp_path):
    (tmp_path / "README.md").write_text(PAGE.read_text())
    folder = run_program(torch_optimizers, "--rounds", "2", "--models", "a small CNN")
    document = json.loads((folder / "torch_optimizer.json").read_text())
    assert set(document) == {"machine", "rounds", "results"}
    timed = {(row["ranks"], row["by"]) for row in document["results"]}
    kinds = [f"{name}, {stage}" for name in torch_optimizers.OPTIMIZERS for stage in torch_optimizers.STAGES]
    assert timed == {(ranks, by) for ranks in (1, 2) for by in [*torch_optimizers.PEERS, *kinds]}
    assert all(is_spread(row["over_torch"]) for row in document["results"])
    shares = [row["share_of_exchange"]["median"] for row in document["results"] if "share_of_exchange" in row]
    assert len(shares) == len(kinds)
    assert all(0 < share < 1 for share in shares), shares
    assert torch_optimizers.blocks(document)["torch optimizer"] in (folder / "README.md").read_text()


def test_rounds_are_interleaved():
    order = []

    def timed(name):
        def run():
            order.append(name)
            return 2.0 if name == "a" else 1.0

        return run

    pair = [timing.Candidate({"is": name}, timed(name), {"over_c": timed("c")}) for name in "ab"]
    rows = timing.interleaved(pair, 2, "test")
    assert "".join(order) == "acbc" * 3
    assert [row["over_c"]["median"] for row in rows] == [2.0, 1.0]


def test_short_calls_are_repeated_and_the_context_is_entered_once():
    entered = []

    class Context:
        def __enter__(self):
            entered.append(1)

        def __exit__(self, *_):
            return None

    counts = []

    def seconds(call, repeats):
        counts.append(repeats)
        return 1e-3

    each = timing.timer(lambda: None, Context, seconds=seconds, least=5e-3)
    assert [each(), each()] == [1e-3, 1e-3]
    assert counts == [1, 1, 1, 5, 5]
    assert len(entered) == 2


@pytest.mark.exhaustive
def test_inner_states(run_program, tmp_path):
    (tmp_path / "README.md").write_text(PAGE.read_text())
    options = ("--steps", "15", "--ranks", "2", "--seeds", "0", "--outer", "local_sgd")
    folder = run_program(inner_states, *options, "--choices", "keep", "average")
    runs = json.loads((folder / "inner_states.json").read_text())
    assert [run["choice"] for run in runs] == ["keep", "average"]
    kept, averaged = (run["megabytes"] for run in runs)
    assert averaged == pytest.approx(3 * kept, rel=0.01)
    assert runs[0]["loss"] == runs[1]["loss"]  # one outer round: the moments have moved nothing yet
    text = (folder / "README.md").read_text()
    assert inner_states.blocks(runs)["inner_states"] in text
    assert run_program(inner_states, "--table")
    assert (folder / "README.md").read_text() == text
