"""The convergence study: its statistics, and that its programs run."""

import json
import math

import noise_floor
import numpy as np
import pytest
import study
from convergence.adversarial_network import frechet_distance
from convergence.training import Run
from convergence.verdict import Paired
from convergence.volume import compressed_ratio, volume

import qcomp


def run_of(seed, final, *, sent=100):
    return Run("task", "method", seed, 10, 2, 5, [(5, 9.0), (10, final)], sent)


def test_methods_are_compared_seed_by_seed():
    adam = {0: run_of(0, 1.0), 1: run_of(1, 3.0), 2: run_of(2, 5.0)}
    other = {2: run_of(2, 5.5), 0: run_of(0, 1.1), 7: run_of(7, 100.0)}
    result = Paired(other, adam)
    assert result.seeds == 2
    assert result.difference == pytest.approx(0.3)
    assert result.difference_spread == pytest.approx(0.4 / math.sqrt(2))
    assert result.baseline_spread == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize(("worse", "keeps_up"), [(1.9, True), (2.1, False), (-5.0, True)])
def test_keeping_up_is_one_standard_deviation_of_the_baseline(worse, keeps_up):
    adam = {seed: run_of(seed, float(2 * seed)) for seed in range(3)}  # a standard deviation of 2
    other = {seed: run_of(seed, 2 * seed + worse) for seed in range(3)}
    assert Paired(other, adam).keeps_up is keeps_up


def test_volume_is_measured_against_a_ring():
    # 2 (N - 1) / N * 4 bytes * 5 parameters * 10 steps
    assert run_of(0, 1.0, sent=50).volume_ratio == pytest.approx(200 / 50)


def test_volume_by_arithmetic():
    # 3 exact steps of 10 with 2 (N - 1) / N * 4 bytes * 500 parameters; 17 compressed ones with a tenth of that.
    run = Run("task", "onebit_adam", 0, 20, 2, 500, [(20, 1.0)], 3 * 2000 + 17 * 200)
    assert compressed_ratio(run) == pytest.approx(10)
    assert volume(20, 3, 17, 10) == pytest.approx(run.volume_ratio) == pytest.approx(20 / 4.7)
    assert volume(20, 1, 10, 10) == pytest.approx(20 / 2)


def test_frechet_distance_of_known_gaussians():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((500, 3))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + np.asarray([1.0, 2.0, 0.0])) == pytest.approx(5)
    # For covariances C and 4 C the trace is that of C + 4 C - 2 * 2 C.
    centred = a - a.mean(axis=0)
    assert frechet_distance(centred, 2 * centred) == pytest.approx(np.trace(np.cov(a, rowvar=False)))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_study_runs_skips_existing_results_and_writes_its_page(run_program, tmp_path, capsys):
    (tmp_path / "README.md").write_text("<!-- residual_network -->\n<!-- end of residual_network -->\n")
    options = ["--tasks", "residual_network", "--seeds", "1", "--steps", "10", "--methods"]
    run_program(study, *options, "adam")
    path = tmp_path / "runs" / "residual_network-adam-0.json"
    first = json.loads(path.read_text())
    assert [step for step, _ in first["curve"]] == list(range(1, 11))
    path.write_text(json.dumps(first | {"bytes_sent": 12345}))
    run_program(study, *options, "adam", "onebit_adam")
    assert json.loads(path.read_text())["bytes_sent"] == 12345
    assert "1-bit Adam" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "residual_network.png").stat().st_size > 1000
    assert "keeps up" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_noise_floor_falls_with_the_ranks(run_program):
    with qcomp.backends.use("numba"):
        folder = run_program(noise_floor, "--steps", "150", "--seeds", "1")
    floors = {
        (row["topology"], row["ranks"]): row["floors"][0]
        for row in json.loads((folder / "noise_floor.json").read_text())
    }
    # 512 elements over 75 steps, correlated over some 20: about 2000 squares, an error of 3% each.
    for ranks in (2, 4, 8):
        assert floors["all_gather", ranks] * ranks == pytest.approx(floors["all_gather", 1], rel=0.15)
        assert floors["two_phase", ranks] > 1.3 * floors["all_gather", ranks]
