"""Benchmarks on slow links: the figures derived from their files, and the network itself where it can be made."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from itertools import groupby
from pathlib import Path

import network_times
import page
import pytest
import torch
from network import bars, journeys, matrix, shaped, tables
from network.journeys import Journey
from network.launch import LINKS, RATES
from network.matrix import Field, summary
from network.methods import COMPUTE, METHODS
from network.models import MODELS
from network.prediction import choice, predicted
from network.recipes import RECIPES, SETTLED, WARMUP
from network.results import Results, Run
from network.timeline import overlap, readiness
from network.volume import volume
from race.settings import Settings

import qcomp
from qcomp.planning import CPU, Cluster, Link, Measured

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "network"
SHAPES = [(256, 128), (256,), (100, 256), (8, 16)]
SIZE = 256 * 128 + 256 + 100 * 256 + 8 * 16
MACHINE = {"cores": 2}


def run_of(
    seconds, *, model="mlp", ranks=2, link="1gbit", shapes=SHAPES, failures=None, alone=None, ready=()
):
    methods = {
        name: {
            "seconds": {"median": value, "quartiles": [value, value]},
            "each": [value],
            "bytes": 1000,
            "predicted_bytes": round(volume(name, shapes).sent(ranks)),
        }
        for name, value in seconds.items()
    }
    by_themselves = {name: {"seconds": {"median": value}} for name, value in (alone or {}).items()}
    return Run(model, ranks, link, 2, MACHINE, shapes, methods, failures or {}, by_themselves, list(ready))


def save(results, run):
    path = results.run_path(run.model, run.ranks, run.link)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run.__dict__))


def measured_of(link, ranks=2):
    return Measured(Cluster(ranks, Link(RATES[link] * tables.PAYLOAD, latency=1e-4)), CPU)


class TestVolume:
    def test_models_have_the_parameters_that_the_page_names(self):
        sizes = {name: sum(p.numel() for p in model.make().parameters()) for name, model in MODELS.items()}
        assert sizes["mlp"] == 10_512_394
        assert round(sizes["transformer"] / 1e6, 1) == 10.2

    def test_every_method_counts_every_element_once(self):
        for name, method in METHODS.items():
            if name != COMPUTE and method.rank is None:
                found = volume(name, SHAPES)
                assert found.exact + found.compressed == SIZE

    def test_payloads(self):
        assert volume(COMPUTE, SHAPES).payload == 0
        assert volume("none", SHAPES).payload == 4 * SIZE
        assert volume("fp16", SHAPES).payload == 2 * SIZE
        # Matrices of more than 10 000 elements are compressed, the rest stays exact.
        sign = volume("sign", SHAPES)
        assert sign.exact == 256 + 8 * 16
        bits = [qcomp.ScaledSign().payload_spec(n).nbytes for n in (256 * 128, 100 * 256)]
        assert sign.payload == sum(bits) + 4 * sign.exact

    @pytest.mark.parametrize("rank", [1, 2])
    def test_power_sgd_sends_factors_where_they_are_smaller(self, rank):
        worth = rank * (256 + 128 + 100 + 256) + 256
        small = 8 * 16 if rank * (8 + 16) * 2 >= 8 * 16 else rank * (8 + 16)
        assert volume(f"powersgd{rank}", SHAPES).exact == worth + small

    def test_power_sgd_decides_as_torch_does(self):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        for shape in [(8, 16), (4, 4), (3, 1000), (12, 12), (1, 50)]:
            for rank in (1, 2):
                compress, _, factors = powerSGD_hook._should_compress(*shape, rank, 2)
                assert volume(f"powersgd{rank}", [shape]).exact == (
                    factors if compress else shape[0] * shape[1]
                )

    def test_predicted_volume_is_what_a_mean_sends(self):
        """In two phases, as counted by a communicator."""
        import numpy as np

        def rank_main(comm):
            params = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
            grads = [param + comm.rank for param in params]
            optimizer = qcomp.CompressedSGD(learning_rate=0.1, compressor=qcomp.ScaledSign())
            state = optimizer.init(params, comm)
            params, state = optimizer.step(params, grads, state, comm)  # compares more than later steps
            before = comm.bytes_sent
            optimizer.step(params, grads, state, comm)
            return comm.bytes_sent - before

        sent = qcomp.comm.run_local(2, rank_main)
        assert sum(sent) / 2 == pytest.approx(volume("sign", SHAPES).sent(2), rel=0.05)


def test_the_share_that_overlaps():
    assert overlap([]) == overlap([0.9]) == (0.0, 1)
    # With four pieces at equal distances, the first is ready after a quarter of the share.
    assert overlap([0.3, 0.5, 0.7, 0.9]) == (0.8, 4)
    assert overlap([0.0, 0.9]) == (1.0, 2)


class TestPrediction:
    def test_a_ring_and_an_all_gather_by_hand(self):
        run, measured = run_of({COMPUTE: 0.1, "none": 1.0, "sign": 1.0}), measured_of("1gbit")
        rate = RATES["1gbit"] * tables.PAYLOAD
        assert predicted("none", run, measured) == pytest.approx(0.1 + 2e-4 + 4 * SIZE / rate)
        found, speed = volume("sign", SHAPES), CPU.speed(qcomp.ScaledSign())
        codec = found.compressed * (speed.encode + 2 * speed.add)
        payload = qcomp.ScaledSign().payload_spec(found.compressed).nbytes + 4 * found.exact
        assert predicted("sign", run, measured) == pytest.approx(0.1 + codec + 1e-4 + payload / rate)

    def test_four_ranks_have_servers(self):
        shapes = [(2048, 1024)]  # all ranks gather smaller models whole
        run = run_of({COMPUTE: 0.1, "sign": 1.0}, ranks=4, shapes=shapes)
        measured, speed = measured_of("1gbit", ranks=4), CPU.speed(qcomp.ScaledSign())
        codec = 2048 * 1024 * (1.25 * speed.encode + speed.decode + speed.add)
        payload = qcomp.ScaledSign().payload_spec(2048 * 1024).nbytes
        wire = 2 * 3 * 1e-4 + 1.5 * payload / (RATES["1gbit"] * tables.PAYLOAD)
        assert predicted("sign", run, measured) == pytest.approx(0.1 + codec + wire)

    def test_the_computing_time_of_a_method_comes_from_ranks_that_train_alone(self):
        seconds, measured = {COMPUTE: 0.1, "powersgd1": 1.0}, measured_of("100mbit")
        run = run_of(seconds, alone={"powersgd1": 0.15, "sign": 0.3, "onebit_adam": 0.31})
        assert predicted("powersgd1", run_of(seconds), measured) is None
        elements = volume("powersgd1", SHAPES).exact
        wire = 3 * 2e-4 + 4 * elements / (RATES["100mbit"] * tables.PAYLOAD)
        assert predicted("powersgd1", run, measured) == pytest.approx(0.15 + wire, rel=1e-3)
        sign = predicted("sign", run, measured)
        assert predicted("onebit_adam", run, measured) == pytest.approx(sign + 0.01)

    def test_with_overlap_one_piece_is_sent_after_the_backward_pass_if_the_link_is_fast(self):
        seconds, measured = {COMPUTE: 0.1, "none": 1.0}, measured_of("1gbit")
        run = run_of(seconds, ready=[0.4, 0.6])
        assert predicted("none", run_of(seconds), measured, overlapped=True) is None
        piece = 2e-4 + 4 * SIZE / 2 / (RATES["1gbit"] * tables.PAYLOAD)
        assert predicted("none", run, measured, overlapped=True) == pytest.approx(0.1 + piece)
        # On a slow link the first piece is sent when it is ready, and the others after it.
        slow = 2 * 2e-4 + 4 * SIZE / (RATES["100mbit"] * tables.PAYLOAD)
        found = predicted("none", run, measured_of("100mbit"), overlapped=True)
        assert found == pytest.approx(max(0.1 + slow / 2, 0.06 + 0.02 + slow))

    def test_power_sgd_has_one_bucket_and_no_overlap(self):
        seconds = {COMPUTE: 0.1, "powersgd1": 0.2}
        run = run_of(seconds, alone={"powersgd1": 0.2}, ready=[0.4, 0.6])
        both = [predicted("powersgd1", run, measured_of("1gbit"), overlapped=o) for o in (0, 1)]
        assert both[0] == both[1]

    def test_the_choice_is_compared_with_the_best_of_the_others(self):
        seconds = {COMPUTE: 0.1, "none": 3.0, "fp16": 1.6, "powersgd1": 0.2, "sign": 0.3, "qsgd4": 0.4}
        shapes = [(2048, 2048)] * 2
        found = choice(run_of(seconds, shapes=shapes, link="100mbit"), measured_of("100mbit"))
        assert found.method == "sign"
        assert found.best == "powersgd1"
        assert found.ratio == pytest.approx(1.5)


@pytest.fixture
def alone():
    """A torch.distributed world that consists of this process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def tiny(monkeypatch):
    """A small model in place of the perceptron."""
    model = MODELS["mlp"]._replace(
        make=lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)),
        batch=lambda: (torch.ones(4, 64), torch.zeros(4, dtype=torch.int64)),
    )
    monkeypatch.setitem(MODELS, "mlp", model)
    return model


@pytest.mark.skipif(sys.platform != "linux", reason="the interface's counter is read from /proc")
class TestMatrix:
    def test_a_method_that_raises_is_left_out_and_the_others_go_on(self, alone, tiny):
        field = Field("mlp", [COMPUTE, "none", "sign"], "lo")

        def fail():
            raise RuntimeError("lost")

        field.trainees["none"].step = fail
        samples = field.rounds(3, "test")
        assert field.failures == {"none": "RuntimeError: lost"}
        assert {method: len(found) for method, found in samples.items()} == {COMPUTE: 3, "sign": 3}
        found = summary(samples, 1)
        assert found[COMPUTE]["bytes"] == 0
        assert found["sign"]["seconds"]["median"] > 0

    def test_ranks_also_train_alone(self, alone, tiny, monkeypatch):
        groups, of_ranks = [], matrix._group
        monkeypatch.setattr(matrix, "_group", lambda *, solo: groups.append(solo) or of_ranks(solo=solo))
        field = Field("mlp", [COMPUTE, "sign"], "lo", ["sign"])
        samples = field.rounds(2, "test")
        assert list(samples) == [COMPUTE, "sign", "sign alone"]
        assert groups == [False, False, True]
        assert not field.failures

    def test_only_the_second_of_two_steps_is_timed(self, alone, tiny):
        field = Field("mlp", [COMPUTE], "lo")
        done = []
        field.step = lambda method: (done.append(method), (float(len(done)), 0.0))[1]
        assert field.rounds(3, "test") == {COMPUTE: [(2.0, 0.0), (4.0, 0.0), (6.0, 0.0)]}

    def test_every_method_trains(self, alone, tiny):
        before = [p.detach() for p in tiny.make().parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch and small models warn of unrelated things
            field = Field("mlp", list(METHODS), "lo")
            field.rounds(4, "test")
        assert not field.failures
        assert set(field.trainees) == set(METHODS)
        assert all(len(list(t.model.parameters())) == len(before) for t in field.trainees.values())

    def test_gradients_become_ready_within_a_step(self, alone, tiny):
        ready = readiness(tiny, alone, 3)
        assert ready == sorted(ready)
        assert 0 < ready[0] <= ready[-1] < 1


class TestTables:
    @pytest.fixture
    def results(self, tmp_path):
        results = Results(tmp_path)
        seconds = {m: 0.1 * (i + 1) for i, m in enumerate(METHODS)}
        times = {"alone": seconds, "ready": [0.4, 0.8]}
        save(results, run_of(seconds, **times))
        without = {m: s for m, s in seconds.items() if m != "powersgd1"}
        save(results, run_of(without, link="100mbit", failures={"powersgd1": "RuntimeError: lost"}, **times))
        for link in ("100mbit", "1gbit"):
            path = results.link_path(2, link)
            path.parent.mkdir(exist_ok=True)
            measured_of(link).save(path)
        path = results.exchange_path("mpi", 2)
        path.parent.mkdir()
        spread = {"median": 0.0263, "quartiles": [0.02, 0.03]}
        found = {kind: {"seconds": spread, "sent": 3_149_664} for kind in ("exchange", "mean")}
        path.write_text(json.dumps({"transport": "mpi", "ranks": 2, "links": {"1gbit": found}}))
        return results

    def test_the_table_of_steps_is_ordered_by_link_and_names_failures(self, results):
        text = tables.blocks(results)["steps"]
        assert "| 100 Mbit/s | 1 Gbit/s |" in text
        assert "| DDP, PowerSGD rank 1 | failed | 400 (400 to 400), 4.00x |" in text
        assert "**DDP, PowerSGD rank 1 failed on 100 Mbit/s**: RuntimeError: lost" in text

    def test_ratios(self, results):
        made = tables.blocks(results)
        assert "| mlp, 2 ranks, 1 Gbit/s | 2.00 | 0.67 |" in made["speedups"]
        assert (
            "| mpi, 2 ranks, 1 Gbit/s | 3.150 | 26.3 | 26.3 (20.0 to 30.0), 1.00x, 1.04x |"
            in made["exchange"]
        )
        assert f"| DDP, no hook | 0.001 | {4 * SIZE / 1e6:.3f} |" in made["bytes"]

    def test_errors_of_the_model_are_counted(self, results):
        text = tables.blocks(results)["model"]
        rows = [line for line in text.splitlines() if line.startswith("| mlp")]
        assert len(rows) == 2 * (len(METHODS) - 1) - 1
        plain, overlapped = (sum("**" in row.split(" | ")[i] for row in rows) for i in (4, 6))
        counts = f"{plain} of {len(rows)} without overlap, {overlapped} of {len(rows)} with it."
        assert text.startswith(f"Off by more than 20%, in bold: {counts}")

    def test_without_files_every_block_says_so(self, tmp_path):
        results = Results(tmp_path)
        made = tables.blocks(results) | journeys.blocks(results)
        assert set(made.values()) == {"Not measured yet."}
        assert bars.picture(results.runs()) is None
        assert journeys.picture(results) is None

    def test_the_committed_page_shows_the_committed_files(self):
        results = Results(PAGE)
        text = (PAGE / page.PAGE).read_text()
        assert page.replaced(text, tables.blocks(results) | journeys.blocks(results)) == text

    def test_the_program_writes_page_and_pictures(self, results, run_program, tmp_path):
        shutil.copy(PAGE / page.PAGE, tmp_path)
        folder = run_program(network_times, "--page")
        assert "lost" in (folder / page.PAGE).read_text()
        assert (folder / "steps.png").read_bytes().startswith(b"\x89PNG")


def journey(method, losses, stages, **changes):
    steps = sum(count for _, count in stages)
    values = {"seconds": 1.0, "link": "loopback", "ranks": 2, "parameters": 10, "machine": MACHINE}
    return Journey(method=method, steps=steps, losses=losses, stages=stages, **values | changes)


class TestJourneys:
    TIMES = dict.fromkeys(SETTLED, 1.0) | {"warmup": 3.0, "onebit_adam": 0.5}

    def test_every_stage_of_a_recipe_is_timed(self):
        for recipe in RECIPES.values():
            stages = [recipe.stage(s) for s in ("exact", "compressed") if recipe.stage(s)]
            assert set(stages) <= SETTLED.keys()

    @pytest.mark.parametrize("name", RECIPES)
    def test_stages_agree_with_the_bytes_that_steps_sent(self, name):
        """In the committed curves a step counts as exact if it sent more than two bytes per element."""
        found = json.loads(Results(PAGE).loss_path(name).read_text())
        settings = Settings(lambda _: 0.0, round(WARMUP * found["steps"]), every=1)
        stages = [RECIPES[name].phase(step, settings) for step in range(found["steps"])]
        assert [[stage, len(list(run))] for stage, run in groupby(stages)] == found["stages"]

    def test_seconds_add_up_over_stages(self):
        found = journey("onebit_adam", [(0, 5.0), (4, 1.0)], [("exact", 2), ("compressed", 2)])
        assert found.clock(self.TIMES) == [0.0, 3.0, 6.0, 6.5, 7.0]

    @pytest.mark.parametrize(
        ("loss", "seconds"), [(5.0, 0.0), (4.0, 3.0), (3.0, 6.0), (2.0, 6.5), (1.0, 7.0), (0.5, None)]
    )
    def test_the_time_to_a_loss_is_interpolated_between_evaluations(self, loss, seconds):
        losses = [(0, 5.0), (2, 3.0), (4, 1.0)]
        found = journey("onebit_adam", losses, [("exact", 2), ("compressed", 2)])
        assert found.seconds_to(loss, self.TIMES) == (None if seconds is None else pytest.approx(seconds))

    def test_a_loss_counts_as_reached_even_if_it_rises_again(self):
        found = journey("adam", [(0, 5.0), (1, 2.0), (2, 3.0)], [("exact", 2)])
        assert found.lowest == 2.0
        assert found.seconds_to(2.0, self.TIMES) == 1.0

    def test_the_target_loss_is_one_that_all_good_methods_reach(self):
        low = journey("adam", [(0, 5.0), (1, 1.0)], [("exact", 1)])
        high = journey("onebit_adam", [(0, 5.0), (1, 2.0)], [("compressed", 1)])
        assert journeys.target([low, high], 1.05) == 1.0  # twice the loss is not close enough
        near = journey("qadam", [(0, 5.0), (1, 1.04)], [("compressed", 1)])
        assert journeys.target([low, high, near], 1.05) == 1.04
        assert journeys.target([low, high, near], 1.02) == 1.0

    def test_table_check_and_picture(self, tmp_path):
        results = Results(tmp_path)
        (tmp_path / "loss").mkdir()
        fast = journey("onebit_adam", [(0, 5.0), (2, 3.0), (4, 1.0)], [("exact", 2), ("compressed", 2)])
        exact = journey("adam", [(0, 5.0), (2, 3.0), (4, 1.0)], [("exact", 4)])
        checked = journey("adam", [(0, 5.0), (4, 1.0)], [("exact", 4)], seconds=5.0, link="1gbit")
        for name, found in {"onebit_adam": fast, "adam": exact, "check-adam": checked}.items():
            results.loss_path(name).write_text(json.dumps(found.__dict__))
        times = {name: {"median": value} for name, value in self.TIMES.items()}
        document = {"rounds": [2], "links": {"1gbit": times}}
        results.loss_path("times").write_text(json.dumps(document))
        made = journeys.blocks(results)
        assert "| 1-bit Adam | 1.000 | 2 of 4 | 3000 / 500 | 7, 0.57x (1 Gbit/s) |" in made["loss"]
        assert "| Adam, exact, 4 steps, 1 Gbit/s | 5.0 | 4.0 | -20% |" in made["check"]
        assert journeys.picture(results) is not None


class TestTasks:
    def options(self, monkeypatch, *arguments):
        monkeypatch.setattr(sys, "argv", ["network_times.py", *arguments])
        return network_times.parse()

    def test_tasks_whose_files_exist_are_skipped(self, monkeypatch, tmp_path):
        results = Results(tmp_path)
        options = self.options(monkeypatch, "--models", "mlp", "--ranks", "2")
        first = [f for part in network_times.TASKS.values() for t in part(options, results) for f in t.files]
        assert len(first) == len(set(first))
        for path in first:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        assert not [t for part in network_times.TASKS.values() for t in part(options, results)]
        first[1].unlink()
        (left,) = [t for part in network_times.TASKS.values() for t in part(options, results)]
        assert left.files == [first[1]]

    def test_the_loopback_is_a_network_of_its_own(self, monkeypatch, tmp_path):
        tasks = network_times.matrix(
            self.options(monkeypatch, "--models", "mlp", "--ranks", "2"), Results(tmp_path)
        )
        assert [(t.link, len(t.files)) for t in tasks] == [(None, 2), (None, 1), ("loopback", 1)]

    def test_one_round_has_no_quartiles(self, monkeypatch, capsys):
        with pytest.raises(SystemExit):
            self.options(monkeypatch, "--rounds", "1")
        assert "--rounds is 1; expected at least 2" in capsys.readouterr().err


class TestRights:
    def test_without_root_it_ends_with_status_2_and_a_message(
        self, monkeypatch, run_program, tmp_path, capsys
    ):
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(sys, "argv", ["network_times.py", "--out", str(tmp_path)])
        assert network_times.main() == 2
        assert capsys.readouterr().err == (
            "network_times.py: error: the shaped network needs root, to make network namespaces: run it with sudo\n"
        )

    def test_ctrl_c_ends_with_status_130_and_says_how_to_continue(self, monkeypatch, tmp_path, capsys):
        def interrupt(tasks):
            raise KeyboardInterrupt

        monkeypatch.setattr(network_times, "require_rights", lambda: None)
        monkeypatch.setattr(network_times, "run", interrupt)
        monkeypatch.setattr(sys, "argv", ["network_times.py", "--out", str(tmp_path)])
        assert network_times.main() == 130
        assert capsys.readouterr().err == "network_times.py: stopped; start it again to go on\n"

    def test_a_failed_task_does_not_stop_the_others(self, monkeypatch, tmp_path):
        started = []

        def launch(transport, ranks, program, *, link):
            started.append(program)
            if len(started) == 1:
                raise network_times.RankError("ranks ended with a status other than 0: {1: -6}")

        monkeypatch.setattr(network_times, "launch", launch)
        tasks = [
            network_times.Task(str(i), "gloo", 2, ["-m", "x"], [tmp_path / "a" / str(i)]) for i in range(2)
        ]
        assert network_times.run(tasks) is True
        assert [program[-1] for program in started] == [str(tmp_path / "a" / str(i)) for i in range(2)]

    def test_without_a_tool_it_names_the_package(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
        with pytest.raises(shaped.NetworkError, match="needs tc, of the package iproute2"):
            shaped.require_rights()

    def test_a_refusal_of_the_kernel_is_an_error_that_quotes_it(self):
        with pytest.raises(
            shaped.NetworkError, match=r"cannot be made here: sh -c 'echo no >&2; exit 1': no"
        ):
            shaped._do("sh", "-c", "echo no >&2; exit 1")


def test_only_namespaces_of_processes_that_are_gone_are_leftovers(monkeypatch):
    monkeypatch.setattr(shaped, "_is_alive", lambda process: process == 11)
    there = ["qcompnet-11-0", "qcompnet-12-0", "qcompnet-12-switch", "qcompnet-12-x", "other-12-0", "qn0"]
    assert shaped.leftovers(there) == ["qcompnet-12-0", "qcompnet-12-switch"]


def test_bytes_are_read_from_the_kernels_table():
    text = "Inter-| Receive | Transmit\n  lo: 1 2 3 4 5 6 7 8 9 10 11\neth0:1000 2 0 0 0 0 0 0 77 8 0\n"
    assert shaped.transmitted("eth0", text) == 77
    assert shaped.transmitted("lo", text) == 9
    with pytest.raises(ValueError, match="interface is 'eth1'"):
        shaped.transmitted("eth1", text)


def test_every_link_has_a_name_and_all_but_one_a_rate():
    assert set(tables.NAMES) == set(LINKS) == {*RATES, "loopback"}


can_make_networks = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or any(shutil.which(tool) is None for tool in shaped.TOOLS),
    reason="network namespaces need root on Linux, iproute2 and util-linux",
)


def namespaces(process):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if f"-{process}-" in line]


@pytest.fixture
def network(allowed):
    with shaped.shaped_network(2, "100mbit") as name:
        yield name


@can_make_networks
class TestNetwork:
    def on(self, network, node, *command):
        environment = os.environ | {shaped.VARIABLE: network}
        done = subprocess.run(
            shaped.enter(node, command), env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def test_nodes_have_names_addresses_rates_and_settings(self, network):
        for node in range(2):
            assert self.on(network, node, "hostname") == f"node{node}\n"
            assert shaped.address(node) in self.on(network, node, "ip", "address", "show", "eth0")
            assert "rate 100Mbit" in self.on(network, node, "tc", "qdisc", "show", "dev", "eth0")
            assert self.on(network, node, "cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle") == "0\n"
        shaped.limit(network, 2, None)
        assert "rate" not in self.on(network, 0, "tc", "qdisc", "show", "dev", "eth0")
        assert self.on(network, 0, "echo", "two words; $HOME 'x'") == "two words; $HOME 'x'\n"

    def test_nodes_reach_each_other_and_nothing_else(self, network):
        assert shaped.address(1) in self.on(network, 0, "ip", "route", "get", shaped.address(1))
        with pytest.raises(subprocess.CalledProcessError):
            self.on(network, 0, "ip", "route", "get", "192.0.2.1")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    def test_nothing_is_left_of_a_network(self, allowed, number):
        """SIGKILL leaves some, until the next network comes up."""
        program = [sys.executable, shaped.__file__, "2", "none", "--", "sh", "-c", "echo up; exec sleep 60"]
        with subprocess.Popen(
            program,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout.readline() == b"up\n"
            assert len(namespaces(process.pid)) == 3
            process.send_signal(number)
            assert process.wait(30) != 0
        assert bool(namespaces(process.pid)) is (number == signal.SIGKILL)
        with shaped.shaped_network(1, None):
            pass
        assert not namespaces(process.pid)

    def test_an_exception_removes_the_network(self):
        with pytest.raises(ZeroDivisionError), shaped.shaped_network(1, None):
            1 / 0  # noqa: B018
        assert not namespaces(os.getpid())
