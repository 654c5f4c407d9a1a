"""``qcomp plan``: what it prints, what it writes, and how it refuses."""

import json
import sys
from dataclasses import replace

import pytest

import qcomp
from qcomp.cli import main, plan
from qcomp.planning import CPU, Cluster, Job, Link, Measured, advise, gpu, methods_for, methods_of
from qcomp.planning.picture import draw

EXAMPLE = ["plan", "--params", "350M", "--ranks", "64", "--link", "10gbit", "--compute-ms", "300"]


def job(params, compute, **settings):
    """Return the job that the command makes, of matrices of 1024 x 1024 and one vector."""
    count, rest = divmod(params, 1 << 20)
    shapes = (*[(1024, 1024)] * count, (rest // 1024, 1024), *([(rest % 1024,)] if rest % 1024 else []))
    return Job(params, compute, shapes=shapes, **settings)


def printed(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))
    return capsys.readouterr().err


class TestPredicting:
    @pytest.mark.exhaustive
    def test_prints_what_python_advises(self, capsys):
        advice = advise(job(350_000_000, 0.3), Cluster(64, Link(1.25e9)))
        assert printed(capsys, *EXAMPLE) == advice.text + "\n"
        for row in advice.rows:
            assert row.time.method.label in advice.text

    @pytest.mark.exhaustive
    def test_json_holds_the_numbers_of_the_text(self, capsys):
        advice = advise(job(350_000_000, 0.3), Cluster(64, Link(1.25e9)))
        document = json.loads(printed(capsys, *EXAMPLE, "--json"))
        assert document["recommended"] == advice.best.time.method.label
        assert document["reason"] == advice.reason
        assert document["compress"] is advice.compress
        assert document["cluster"]["ranks"] == 64
        assert document["cluster"]["inside"]["streams"] is None  # unlimited
        assert [m["step"] for m in document["methods"]] == [row.time.seconds for row in advice.rows]
        for method, row in zip(document["methods"], advice.rows, strict=True):
            plain = row.time.method.is_allreduce
            loop = getattr(row.time.method, "loop", None)
            assert loop is None or loop.compressor.spec == method["compressor"]
            assert method["compressor"] == (None if plain else row.time.method.compressor.spec)
            assert ("pays_below" in method) is not plain
            assert method["sent"] == row.time.sent

    def test_every_option_has_an_effect(self, capsys):
        options = [
            *("--ranks-per-node", "4", "--latency", "25us", "--streams", "2", "--inside", "100gbit"),
            *("--gradient-bytes", "2", "--overlap", "0.6", "--buckets", "5", "--overlap-compressed"),
            *(
                "--warmup",
                "0.15",
                "--machine",
                "gpu",
                "--compressor",
                "sign",
                "--compressor",
                "qsgd:levels=127",
            ),
        ]
        sign, qsgd = qcomp.ScaledSign(), qcomp.QSGD(levels=127)
        job = Job(350_000_000, 0.3, gradient_bytes=2, overlap=0.6, buckets=5, overlap_compressed=True)
        inside = Link(12.5e9, 10e-6, streams=float("inf"))
        cluster = Cluster(64, Link(1.25e9, 25e-6, streams=2.0), ranks_per_node=4, inside=inside)
        expected = advise(job, cluster, gpu(), methods=methods_of(cluster, 2, [sign, qsgd]), warmup=0.15)
        assert printed(capsys, *EXAMPLE, *options) == expected.text + "\n"

    @pytest.mark.exhaustive
    def test_measured_figures_are_defaults_for_options(self, capsys, tmp_path):
        path = tmp_path / "measured.json"
        cluster = Cluster(4, Link(1e8, 1e-4, streams=2.0, per_message=1e-5), ranks_per_node=2)
        machine = replace(CPU, call=1e-3, tensor=1e-4)
        Measured(cluster, machine, 0.25).save(path)
        given = ["plan", "--params", "25M", "--tensors", "200", "--measured", str(path)]
        expected = advise(job(25_000_000, 0.25, tensors=200), cluster, machine)
        assert printed(capsys, *given) == expected.text + "\n"
        more = printed(capsys, *given, "--ranks", "64", "--compute-ms", "100")
        larger = Cluster(64, cluster.link, ranks_per_node=2)
        assert more == advise(job(25_000_000, 0.1, tensors=200), larger, machine).text + "\n"

    @pytest.mark.slow
    def test_the_link_inside_a_node_is_not_taken_for_one_between_nodes(self, capsys, tmp_path):
        path = tmp_path / "measured.json"
        Measured(Cluster(2, Link(1e9, 1e-5)), CPU, 0.25, on_one_node=True).save(path)
        given = ["plan", "--params", "25M", "--measured", str(path)]
        assert "--ranks is 64, but the 2 measured ranks share a node" in refused(
            capsys, *given, "--ranks", "64"
        )
        for fits in ((), ("--ranks", "2"), ("--ranks", "64", "--link", "10gbit")):
            assert " times as fast as " in printed(capsys, *given, *fits)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["", "folder"])
    def test_a_picture_needs_the_name_of_a_file(self, capsys, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        told = refused(capsys, *EXAMPLE, "--picture", name)
        assert f"--picture is {name!r}; expected the name of a file" in told
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]

    @pytest.mark.exhaustive
    def test_a_picture(self, capsys, tmp_path):
        pytest.importorskip("matplotlib")
        printed(capsys, *EXAMPLE, "--picture", str(tmp_path / "plan.png"))
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.exhaustive
    def test_a_picture_has_few_curves_in_the_order_of_its_legend(self, tmp_path, monkeypatch):
        figure = pytest.importorskip("matplotlib.figure").Figure
        saved = []
        monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: saved.append(self))
        compressors = [qcomp.QSGD(levels=2**bits - 1) for bits in range(1, 8)]
        cluster = Cluster(64, Link(1.25e9))
        methods = methods_of(cluster, 4, [*compressors, qcomp.ScaledSign(), qcomp.MinMaxUInt8()])
        advice = advise(Job(350_000_000, 0.3), cluster, gpu(), methods=methods)
        draw(advice, tmp_path / "plan.svg")
        (axes,) = saved[0].axes
        curves = [line for line in axes.lines if not line.get_label().startswith("_")]
        labels = [line.get_label() for line in curves]
        assert len(labels) == len(set(labels)) == 8
        assert advice.best.time.method.label in labels
        assert advice.plain.time.method.label in labels
        heights = [line.get_ydata()[0] for line in curves]
        assert heights == sorted(heights, reverse=True)

    @pytest.mark.slow
    def test_a_picture_without_matplotlib(self, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert "matplotlib is missing: pip install 'qcomp[plot]'" in refused(
            capsys, *EXAMPLE, "--picture", "p.png"
        )


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "350X"], "'350X' is not understood; expected a count such as 350M"),
        (["--params", "1e400"], "argument --params: '1e400' is too large; expected a count such as 350M"),
        (["--link", "10"], "'10' is not understood; expected a bandwidth such as 10gbit"),
        (["--latency", "25"], "'25' is not understood; expected a time such as 25us"),
        (["--ranks", "0"], "--ranks is 0; expected at least 1"),
        (["--ranks-per-node", "5"], "--ranks-per-node is 5; expected a divisor of 64 ranks"),
        (["--compute-ms", "-1"], "--compute-ms is -1; expected milliseconds"),
        (["--overlap", "2"], "--overlap is 2.0; expected a share"),
        (["--warmup", "-0.5"], "--warmup is -0.5; expected a share"),
        (["--compressor", "zip"], "there is no compressor 'zip'"),
        (["--compressor", "topk:k=8,bucket_size=512"], "--compressor is topk:k=8,bucket_size=512; no speed"),
        (["--measured", "/no/such/file"], "--measured is '/no/such/file'; [Errno 2] No such file"),
        (["--step", "train:step"], "--step is 'train:step', but --measure is not given; expected both"),
        (["--picture", "plan.nonsense"], "--picture is 'plan.nonsense'; "),
        (["--picture", "/no/such/plan.png"], "--picture is '/no/such/plan.png'; "),
        (["--inside", "0gbit"], "'0gbit' is no bandwidth; expected more than 0"),
        (["--link", "0gbit"], "'0gbit' is no bandwidth; expected more than 0"),
        (["--streams", "0"], "--streams is 0.0; expected a number of ranks"),
        (["--exact", "400M"], "--exact is 400000000; expected 0 to 350000000"),
        (["--matrix", "1024"], "'1024' is not understood; expected rows and columns such as 1024x4096"),
        (["--matrix", "0x4"], "'0x4' is not understood"),
        (
            ["--matrix", "1x1"],
            "--matrix is 1x1, so --params 350000000 would make 350000000 matrices; expected at most",
        ),
        (
            ["--params", "1e18"],
            "--matrix is 1024x1024, so --params 1000000000000000000 would make 953674316406 ",
        ),
        (["--task", "chess"], "invalid choice: 'chess'"),
    ],
)
def test_wrong_options_are_errors_that_name_them(capsys, arguments, message):
    assert message in refused(capsys, *EXAMPLE, *arguments)


@pytest.mark.parametrize("missing", ["--params", "--ranks", "--link", "--compute-ms"])
def test_missing_options_are_errors_that_name_them(capsys, missing):
    at = EXAMPLE.index(missing)
    assert f"{missing} is not given" in refused(capsys, *EXAMPLE[:at], *EXAMPLE[at + 2 :])


class TestMeasuring:
    SMALL = ("plan", "--measure", "--elements", "5000", "--rounds", "1", "--compressor", "sign")

    @pytest.fixture
    def train(self, tmp_path, monkeypatch):
        """A module in the current folder, like a user's."""
        (tmp_path / "train_of_test.py").write_text("calls = []\n\ndef step():\n    calls.append(1)\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        yield "train_of_test"
        sys.modules.pop("train_of_test", None)

    def test_one_rank_measures_compressors_and_a_step(self, capsys, train, tmp_path):
        out = tmp_path / "measured.json"
        text = printed(capsys, *self.SMALL, "--step", f"{train}:step", "--out", str(out))
        assert text.startswith("one rank: no link to measure\nsign:bucket_size=4096,scale=l1: encode ")
        assert len(sys.modules[train].calls) == 2
        measured = Measured.load(out)
        assert list(measured.machine.speeds) == [qcomp.ScaledSign().spec]
        assert measured.compute is not None

    @pytest.mark.parametrize(
        ("step", "message"),
        [
            ("train_of_test", "expected module:function"),
            ("train_of_test:walk", "train_of_test has no function 'walk'"),
            ("train_of_test:calls", "train_of_test has no function 'calls'"),
            ("no_such_module:step", "No module named 'no_such_module'"),
        ],
    )
    def test_a_missing_step_function_is_an_error(self, capsys, train, step, message):
        assert message in refused(capsys, *self.SMALL, "--step", step)

    def test_json_holds_what_was_measured_and_what_it_advises(self, capsys, train):
        alone = json.loads(printed(capsys, *self.SMALL, "--step", f"{train}:step", "--json"))
        assert list(alone["measured"]["machine"]["speeds"]) == [qcomp.ScaledSign().spec]
        assert alone["advice"] is None
        asked = ("--params", "1M", "--ranks", "4", "--link", "1gbit", "--json")
        both = json.loads(printed(capsys, *self.SMALL, "--step", f"{train}:step", *asked))
        assert both["advice"]["job"]["params"] == 1_000_000

    def test_measuring_cannot_be_combined_with_measured_figures(self, capsys):
        assert "expected one" in refused(capsys, *self.SMALL, "--measured", "measured.json")

    @pytest.mark.parametrize("option", ["--elements", "--rounds"])
    def test_measuring_nothing_is_an_error(self, capsys, option):
        assert f"{option} is 0; expected at least 1" in refused(capsys, *self.SMALL, option, "0")

    def test_what_is_measured_by_default_is_enough_to_compare_all_methods(self, capsys, tmp_path):
        out = str(tmp_path / "measured.json")
        printed(capsys, *self.SMALL[: self.SMALL.index("--compressor")], "--out", out)
        found = printed(capsys, *EXAMPLE, "--params", "2M", "--measured", out, "--json")
        compared = {method["method"] for method in json.loads(found)["methods"]}
        small, cluster = job(2_000_000, 0.3), Cluster(64, Link(1.25e9))
        assert compared == {method.label for method in methods_for(small, cluster, CPU)}

    def test_a_link_is_still_needed_after_one_rank_measured(self, capsys):
        assert "--ranks is not given" in refused(capsys, *self.SMALL, "--params", "1M", "--compute-ms", "5")

    @pytest.mark.exhaustive
    @pytest.mark.mpi
    def test_ranks_of_mpirun_measure_their_link_and_one_prints(self, mpirun, tmp_path):
        out = tmp_path / "measured.json"
        options = ["--out", out, "--params", "1M", "--compute-ms", "5"]
        done = mpirun(2, ["-m", "mpi4py", "-m", "qcomp.cli", *self.SMALL, *options])
        assert done.stdout.count("in each direction at once") == 1
        assert done.stdout.count("ompress") >= 1
        assert "2 ranks, all on one node: the link is the one inside it" in done.stdout
        measured = Measured.load(out)
        assert measured.on_one_node
        assert measured.cluster.ranks == 2
        assert measured.cluster.link.bandwidth > 1e6


class TestOut:
    SMALL = TestMeasuring.SMALL

    @pytest.mark.parametrize("name", ["", "no/such/folder/measured.json"])
    def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(
        self, capsys, tmp_path, monkeypatch, name
    ):
        monkeypatch.setattr(plan, "measure", lambda *_, **__: pytest.fail("it has measured"))
        assert "--out is " in refused(capsys, *self.SMALL, "--out", str(tmp_path / name))

    def test_a_refused_measurement_leaves_no_file(self, capsys, tmp_path, monkeypatch):
        def stop(*_, **__):
            raise ValueError("stopped")

        monkeypatch.setattr(plan, "measure", stop)
        refused(capsys, *self.SMALL, "--out", str(tmp_path / "measured.json"))
        assert list(tmp_path.iterdir()) == []

    def test_a_wrong_option_is_refused_before_anything_is_measured(self, capsys, monkeypatch):
        monkeypatch.setattr(plan, "measure", lambda *_, **__: pytest.fail("it has measured"))
        assert "--overlap is 2.0" in refused(capsys, *self.SMALL, "--params", "1M", "--overlap", "2")


@pytest.mark.exhaustive
def test_the_shape_of_matrices_changes_the_bytes_of_powersgd(capsys):
    """PowerSGD of rank 1 sends one row and one column per matrix."""

    def sent(*options):
        document = json.loads(printed(capsys, *EXAMPLE, *options, "--json"))
        return next(m["sent"] for m in document["methods"] if m["method"] == "powersgd:rank=1, identity")

    assert sent("--matrix", "1024x1024") == sent()
    assert sent("--matrix", "4096x4096") < 0.4 * sent()


def test_without_powersgd_and_muon_any_number_of_parameters_is_compared(capsys):
    found = json.loads(printed(capsys, *EXAMPLE, "--params", "1e18", "--compressor", "sign", "--json"))
    assert found["job"]["params"] == 10**18
    assert all(0 < method["step"] < float("inf") for method in found["methods"])


def test_methods_can_be_compared_by_seconds_alone(capsys):
    """Signs stand for 1-bit Adam's gradients, which need many steps; compared by seconds alone they win."""
    options = ("--compressor", "sign", "--link", "1gbit")
    document = json.loads(printed(capsys, *EXAMPLE, *options, "--json"))
    alone = json.loads(printed(capsys, *EXAMPLE, *options, "--task", "none", "--json"))
    assert (document["compress"], document["task"]) == (False, "language model")
    assert (alone["compress"], alone["task"]) == (True, None)
    assert "steps to a loss" not in printed(capsys, *EXAMPLE, *options, "--task", "none")
