"""The examples as a user starts them, on real ranks under mpirun."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TRAIN = EXAMPLES / "train_lm.py"
STEPS = 6
SOON = ("-W", "ignore:the variance is frozen after")  # because the runs are so short

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks"), [("mpi_numpy.py", 3), pytest.param("mpi_jax.py", 2, marks=pytest.mark.slow)]
)
def test_ranks_end_with_identical_parameters(mpirun, script, ranks):
    job = mpirun(ranks, ["-m", "mpi4py", EXAMPLES / script], timeout=200)
    assert f"all {ranks} ranks hold identical parameters" in job.stdout


def test_the_numpy_and_jax_examples_differ_in_little_more_than_the_gradient():
    ours, theirs = ((EXAMPLES / name).read_text().splitlines() for name in ("mpi_numpy.py", "mpi_jax.py"))
    assert len(ours) < 80
    assert len(set(theirs) - set(ours)) <= 6


@pytest.mark.exhaustive
@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 2)])
def test_a_mesh_of_jax(mpirun, monkeypatch, processes, devices):
    pytest.importorskip("optax", reason="optax is not installed")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    job = mpirun(processes, ["-m", "mpi4py", EXAMPLES / "jax_mesh.py"], timeout=200)
    assert job.stdout.count(f"all {devices} devices hold identical parameters") == 1
    assert float(re.search(r"accuracy ([0-9.]+)", job.stdout)[1]) > 0.8


# A stand-in for CuPy: it has NumPy's arrays, and as many GPUs as the environment says.
CUPY = """
import os, sys
from numpy import asarray, exp, float32, logaddexp, mean
asnumpy = asarray

class ndarray: ...
class generic: ...

class cuda:
    class runtime:
        class CUDARuntimeError(RuntimeError): ...

        @staticmethod
        def getDeviceCount():
            if os.environ["GPUS"] == "none":
                raise cuda.runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
            return int(os.environ["GPUS"])

    class Device:
        def __init__(self, number):
            assert number < int(os.environ["GPUS"])

        def use(self): ...

    class nccl:
        available = False

sys.modules["cupy.cuda.nccl"] = cuda.nccl
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Let the ranks import a stand-in for CuPy with some GPUs: ``stand_in(gpus)``."""

    def put(gpus):
        (tmp_path / "cupy.py").write_text(CUPY)
        monkeypatch.setenv("GPUS", str(gpus))
        found = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([found] if found else [])]))

    return put


def refusal(job):
    """Return the only line that an example printed before all ranks ended with status 2."""
    assert job.returncode == 2
    assert job.stdout == ""
    lines = [line for line in job.stderr.splitlines() if not line.startswith("Abort(2)")]  # MPI's own
    assert len(lines) == 1, job.stderr
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("script", [pytest.param("cupy_mpi.py", marks=pytest.mark.slow), "cupy_nccl.py"])
def test_without_cupy_the_gpu_examples_end_on_every_rank_with_a_message(
    mpirun, script, tmp_path, monkeypatch
):
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = mpirun(3, ["-m", "mpi4py", EXAMPLES / script], timeout=60, check=False)
    assert refusal(job) == "3 of 3 ranks cannot start: rank 0 lacks CuPy: pip install 'qcomp[cuda]'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "gpus", "what"),
    [
        ("cupy_mpi.py", "none", "2 of 2 ranks cannot start: rank 0 lacks a CUDA device that CuPy can use"),
        pytest.param(
            "cupy_mpi.py",
            0,
            "2 of 2 ranks cannot start: rank 0 lacks a CUDA device that CuPy can use",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "cupy_nccl.py",
            2,
            "2 of 2 ranks cannot start: rank 0 lacks CuPy with NCCL: NVIDIA's nccl for it",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_gpu_examples_name_what_is_missing(mpirun, stand_in, script, gpus, what):
    stand_in(gpus)
    assert refusal(mpirun(2, ["-m", "mpi4py", EXAMPLES / script], timeout=60, check=False)) == what


@pytest.mark.slow
def test_one_rank_without_a_gpu_ends_all_ranks(mpirun, stand_in, tmp_path):
    stand_in(1)
    (tmp_path / "cupy.py").write_text(CUPY.replace("available = False", "available = True"))
    job = mpirun(2, ["-m", "mpi4py", EXAMPLES / "cupy_nccl.py"], timeout=60, check=False)
    assert refusal(job) == (
        "1 of 2 ranks cannot start: rank 1 lacks a GPU of its own, which NCCL requires for every rank"
    )


@pytest.mark.slow
def test_the_gpu_example_over_mpi_trains_as_its_numpy_twin(mpirun, stand_in):
    stand_in(1)
    job = mpirun(2, ["-m", "mpi4py", EXAMPLES / "cupy_mpi.py"], timeout=200)
    twin = mpirun(2, ["-m", "mpi4py", EXAMPLES / "mpi_numpy.py"], timeout=200)
    how, *lines = job.stdout.splitlines()
    assert how == "buffers are staged through page-locked host memory"
    assert [re.sub("[0-9,]+ bytes", "", line) for line in lines] == [
        re.sub("[0-9,]+ bytes", "", line) for line in twin.stdout.splitlines()
    ]


@pytest.mark.gpu
def test_the_gpu_example_over_mpi_on_a_gpu(mpirun):
    pytest.importorskip("cupy")
    job = mpirun(2, ["-m", "mpi4py", EXAMPLES / "cupy_mpi.py"], timeout=200)
    assert "all 2 ranks hold identical parameters" in job.stdout


@pytest.mark.gpu
def test_the_gpu_example_over_nccl_with_one_gpu_per_rank(mpirun):
    cupy = pytest.importorskip("cupy")
    ranks = cupy.cuda.runtime.getDeviceCount()
    job = mpirun(ranks, ["-m", "mpi4py", EXAMPLES / "cupy_nccl.py"], timeout=200)
    assert f"all {ranks} ranks hold identical parameters" in job.stdout


def train(mpirun, folder, *options, ranks=2):
    job = mpirun(
        ranks,
        [*SOON, "-m", "mpi4py", TRAIN, "--steps", STEPS, "--batch", 1, "--out", folder, *options],
        timeout=200,
    )
    return job, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_training_counts_the_bytes_that_it_sends_and_draws_its_curves(mpirun, tmp_path):
    job, summary = train(mpirun, tmp_path, ranks=3)
    assert [run["optimizer"] for run in summary] == ["adam", "onebit_adam", "qadam", "qsgd"]
    parameters = summary[0]["parameters"]
    ring = 2 * (3 - 1) / 3 * 4 * parameters
    for run in summary:
        assert run["ranks"] == 3
        assert run["compression_ratio"] == pytest.approx(STEPS * ring / run["bytes_sent_per_rank"])
    exact, onebit, qadam, qsgd = summary
    assert all(run["exact_elements"] <= 0.01 * parameters for run in (onebit, qadam, qsgd))
    assert all(
        label in job.stdout for label in ("Adam, exact", "1-bit Adam", "QAdam, 8-bit", "SGD, 4-bit QSGD")
    )
    # Chunks are whole buckets, so the busiest of three ranks sends slightly more than a third.
    assert exact["compression_ratio"] == pytest.approx(1, rel=0.01)
    assert onebit["compressed_stage_ratio"] >= 24
    assert qadam["compressed_stage_ratio"] >= 3.8
    assert qsgd["compression_ratio"] >= 7
    for run in (onebit, qadam):
        w, r = run["warmup_steps"] / run["steps"], run["compressed_stage_ratio"]
        assert run["compression_ratio"] == pytest.approx(1 / (w + (1 - w) / r), rel=0.02)
    for picture in ("loss.png", "diagnostics.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    for name, curves in zip(
        ("adam", "qsgd"), json.loads((tmp_path / "curves.json").read_text())[::3], strict=True
    ):
        (first,) = curves["diagnostics"]
        assert first["step"] == 1
        assert first["drifted_ranks"] == 0
        assert ("cosine" in first) is (name == "qsgd")


@pytest.mark.slow
def test_resuming_is_as_if_there_had_been_no_stop(mpirun, tmp_path):
    options = ("--optimizer", "onebit_adam")
    _, (whole,) = train(mpirun, tmp_path / "whole", *options)
    checkpoints = ("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 3)
    stopped = mpirun(
        2,
        [
            *SOON,
            TRAIN,
            "--steps",
            STEPS,
            "--batch",
            1,
            "--out",
            tmp_path / "cut",
            *options,
            *checkpoints,
            "--stop-after",
            4,
        ],
        timeout=200,
        check=False,
    )
    assert stopped.returncode == 130
    # Kernels return the same bytes as the pure version, so the run may resume with them.
    _, (resumed,) = train(
        mpirun, tmp_path / "resumed", *options, *checkpoints, "--resume", "--kernels", "numba"
    )
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    assert resumed["validation_loss"] == whole["validation_loss"]
    assert resumed["bytes_sent_per_rank"] == whole["bytes_sent_per_rank"]


@pytest.mark.slow
def test_ranks_with_different_compressors_all_stop_and_say_so(mpirun, tmp_path):
    def rank(compressor):
        return [TRAIN, "--optimizer", "onebit_adam", "--compressor", compressor, "--out", tmp_path]

    other = [":", "-n", 1, sys.executable, *rank("sign:scale=rms")]
    job = mpirun(1, [*rank("sign:scale=l1"), *other], timeout=100, check=False)
    assert job.returncode == 2
    assert "the ranks were not started alike: settings.compressor is" in job.stderr
    assert "scale=l1' on rank 0" in job.stderr
    assert "scale=rms' on rank 1" in job.stderr


def torchrun(script, *arguments, ranks=2):
    """Run an example on ranks of torchrun; return its output."""
    launcher = Path(sys.executable).parent / "torchrun"
    return printed([launcher, "--nproc-per-node", str(ranks), EXAMPLES / script, *arguments], ranks)


def python(script, *arguments, ranks=2):
    """Run an example that starts its ranks itself; return its output."""
    return printed([sys.executable, EXAMPLES / script, *arguments], ranks)


def printed(command, ranks):
    """Run a command that trains on ranks, with the kernels that its users have; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "QCOMP_KERNELS"}
    job = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert f"all {ranks} ranks hold identical parameters" in job.stdout
    return job.stdout


@pytest.mark.slow
def test_an_ordinary_script_with_an_optimizer_for_torch():
    lines = torchrun("torch_optimizer.py").splitlines()
    assert "compressed" in lines[2]
    sent, exact = (int(words.split()[0].replace(",", "")) for words in lines[-1].split("; ")[:2])
    small = (144 + 16 + 16 + 64 + 10) / 19706  # the parameters that stay exact
    warm_up = 40 / 150
    each_step = 40 / (4 * 19706)  # bits that mark used parameters, verdicts, padding
    assert exact / sent == pytest.approx(
        1 / (warm_up + (1 - warm_up) * (small + (1 - small) / 32) + each_step), rel=0.05
    )
    assert float(lines[-1].split("; ")[2].split("%")[0]) > 90


@pytest.mark.exhaustive
def test_the_same_script_under_mpirun(mpirun):
    job = mpirun(2, ["-m", "mpi4py", EXAMPLES / "torch_optimizer.py"], timeout=200)
    assert "all 2 ranks hold identical parameters" in job.stdout


@pytest.mark.exhaustive
def test_a_script_in_an_outer_loop(mpirun):
    lines = torchrun("outer_loop.py").splitlines()
    sent, exact, read = (words.split()[0] for words in lines[-1].split("; "))
    share = 0.2 * 48 / 32 / 15  # the share of the elements, with their indices, every 15 steps
    assert int(sent.replace(",", "")) / int(exact.replace(",", "")) == pytest.approx(share, rel=0.2)
    assert float(read.rstrip("%")) > 90
    job = mpirun(2, ["-m", "mpi4py", EXAMPLES / "outer_loop.py"], timeout=200)
    assert "all 2 ranks hold identical parameters" in job.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "ranks", "options"),
    [("fsdp", 2, ()), ("fsdp", 2, ("--muon",)), ("hsdp", 4, ()), ("replicate", 2, ())],
)
def test_a_sharded_script(mesh, ranks, options):
    lines = torchrun("torch_fsdp.py", "--mesh", mesh, *options, ranks=ranks).splitlines()
    sent, read = lines[-1].split("; ")
    exact = (
        4 * 2 * 101_706 * 100 * (1 - 1 / ranks)
    )  # bytes of a step's gradients and weights, or of a mean of all gradients
    assert int(sent.split()[0].replace(",", "")) < exact / 2.5
    assert float(read.split("%")[0]) > 80


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("framework", "arguments"),
    [
        *product(["accelerate", "lightning", "transformers"], [(), ("--hook",)]),
        ("transformers", ("--outer",)),
    ],
)
def test_examples_with_frameworks_that_wrap_the_model(framework, arguments):
    pytest.importorskip(framework)
    script = f"with_{framework}.py"
    if framework == "lightning":  # Lightning starts its processes itself
        line = python(script, *arguments).splitlines()[-1]
    else:
        line = torchrun(script, *arguments).splitlines()[-1]
    assert "all 2 ranks hold identical parameters" in line
    assert float(line.split("; ")[1].split("%")[0]) > 80


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["torch_ddp_hook.py", "torch_fsdp.py", "outer_loop.py"])
def test_one_rank_of_torchrun_trains_too(script):
    assert "all 1 ranks hold identical parameters" in torchrun(script, ranks=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["plain", "hook", "onebit_adam"])
def test_ranks_of_torchrun_end_with_identical_parameters(method):
    stdout = torchrun("torch_ddp_hook.py", "--method", method)
    losses = [float(line.split()[-1]) for line in stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.8 * losses[0]
    if method != "plain":
        sent, exact = (
            int(words.split()[0].replace(",", ""))
            for words in next(line for line in stdout.splitlines() if "bytes sent" in line).split("; ")
        )
        warmup = {"hook": 2, "onebit_adam": 50}[method] / 200
        small = 4616 / 70152  # the parameters that stay exact
        assert exact / sent == pytest.approx(
            1 / (warmup + (1 - warmup) * (small + (1 - small) / 32)), rel=0.05
        )
