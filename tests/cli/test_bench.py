"""``qcomp bench`` and ``qcomp warmup``: timings on this machine, and compilation of its kernels."""

import json
import os
import re
import subprocess
import sys

import pytest

import qcomp
from qcomp.cli import main

SMALL = ["--elements", "5k", "--rounds", "2"]


def refused(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))
    return capsys.readouterr().err


class TestBench:
    def test_a_row_for_each_compressor(self, capsys):
        assert main(["bench", *SMALL]) == 0
        head, blank, columns, *rows = capsys.readouterr().out.splitlines()
        assert head.startswith("5,000 float32 of numpy, kernels pure; a copy takes ")
        assert blank == ""
        parts = ["encode", "ns", "copies", "decode", "ns", "copies", "add", "ns", "copies"]
        assert columns.split() == ["compressor", "bits", *parts]
        assert [row.split(":")[0] for row in rows] == [
            "sign",
            "sign",
            "onebit_sgd",
            *["qsgd"] * 3,
            "minmax",
            "cast",
        ]
        assert len({len(row) for row in (columns, *rows)}) == 1

    def test_json_has_the_figures_of_the_table(self, capsys):
        asked = ["bench", "--compressor", "qsgd:levels=7", "--compressor", "topk:k=3,bucket_size=64", *SMALL]
        assert main([*asked, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["arrays"], facts["kernels"], facts["elements"], facts["rounds"]) == (
            "numpy",
            "pure",
            5000,
            2,
        )
        qsgd, topk = facts["compressors"]
        assert topk["spec"] == "topk:k=3,bucket_size=64"
        assert 4 < qsgd["bits"] < 4.2
        for row in (qsgd, topk):
            for part in ("encode", "decode", "add"):
                assert row[f"{part}_ns"] > 0
                ratio = row[f"{part}_ns"] / facts["copy_ns"]
                assert row[f"{part}_over_copy"] == pytest.approx(ratio)

    def test_kernels_are_named_and_timed(self, capsys):
        pytest.importorskip("numba")
        with qcomp.backends.use("numba"):
            assert main(["bench", "--compressor", "sign", *SMALL, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kernels"] == "numba"

    @pytest.mark.slow
    def test_torch(self, capsys):
        pytest.importorskip("torch")
        assert main(["bench", "--arrays", "torch", "--compressor", "sign", *SMALL]) == 0
        assert "float32 of torch" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--compressor", "sgin"], "there is no compressor 'sgin'"),
            (["--elements", "0"], "--elements is 0; expected at least 1"),
            (["--elements", "many"], "'many'"),
            (["--rounds", "0"], "--rounds is 0; expected at least 1"),
            (["--arrays", "tensorflow"], "invalid choice: 'tensorflow'"),
        ],
    )
    def test_wrong_usage(self, capsys, arguments, message):
        assert message in refused(capsys, "bench", *arguments)

    def test_a_device_that_is_not_there(self, capsys, monkeypatch):
        torch = pytest.importorskip("torch")

        def refuse(*_):
            raise RuntimeError("No CUDA GPUs are available")

        monkeypatch.setattr(torch.Tensor, "to", refuse)  # also on a machine that has the device
        assert "--arrays is 'torch-cuda'; " in refused(capsys, "bench", "--arrays", "torch-cuda")


class TestWarmup:
    def test_without_kernels_the_reason_is_printed(self, capsys):
        pytest.importorskip("numba")
        assert main(["warmup"]) == 1  # tests run the pure version
        out = capsys.readouterr().out
        assert out.startswith("numpy float32: kernels none: was asked for; numba would take")

    def test_json(self, capsys):
        pytest.importorskip("numba")
        asked = ["warmup", "--compressor", "sign", "--dtype", "float32,bfloat16", "--json"]
        with qcomp.backends.use("numba"):
            status = main(asked)
        document = json.loads(capsys.readouterr().out)
        assert document["arrays"] == "numpy"
        assert document["compressors"] == ["sign:bucket_size=4096,scale=l1"]
        first, second = document["dtypes"]
        assert (first["dtype"], first["kernels"], first["problem"]) == ("float32", "numba", None)
        assert first["seconds"] >= 0
        assert second == {"dtype": "bfloat16", "kernels": None, "problem": "numpy has no bfloat16"}
        assert status == 1

    def test_kernels_for_every_shape_cannot_be_compiled_ahead(self, capsys):
        pytest.importorskip("jax")
        with qcomp.backends.use("jax"):
            assert main(["warmup", "--arrays", "jax"]) == 1
        assert "compiles anew for every shape" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--dtype", "int32"], "'int32' is none of float32, float16, bfloat16, float64"),
            (["--compressor", "sign:levels=7"], "option 'levels=7'; sign has"),
        ],
    )
    def test_wrong_usage(self, capsys, arguments, message):
        assert message in refused(capsys, "warmup", *arguments)

    @pytest.mark.exhaustive
    def test_training_after_a_warmup_compiles_nothing(self, tmp_path):
        """Run in a process of its own, with an empty cache that warmup fills."""
        pytest.importorskip("numba")
        environment = {**os.environ, "QCOMP_KERNELS": "numba", "NUMBA_CACHE_DIR": str(tmp_path)}
        script = (
            "import numpy as np, qcomp\n"
            "comm = qcomp.comm.LocalCommunicator.alone()\n"
            "opt = qcomp.OneBitAdam(learning_rate=0.1, freeze=1, exact=None)\n"
            "params = np.ones(5000, dtype=np.float32)\n"
            "state = opt.init(params, comm)\n"
            "for _ in range(3):\n"
            "    params, state = opt.step(params, params, state, comm)\n"
        )
        said = []
        for command in (["-m", "qcomp", "warmup"], ["-W", "ignore", "-c", script], ["-m", "qcomp", "warmup"]):
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            said.append(done.stderr.count("compiling kernels"))
        assert said == [1, 0, 0]


@pytest.mark.parametrize("elements", ["1e20", "1e16"])
def test_a_vector_beyond_memory_is_an_error_without_a_traceback(capsys, elements):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--elements", elements])
    assert re.search(r"--elements is|not enough memory", capsys.readouterr().err)
