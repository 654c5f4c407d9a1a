"""Scripts like public ones train beside their conversions, past the freeze, and go on from what they have saved."""

import functools
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil", reason="psutil is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import conversions
import torch.distributed as dist

WAYS = [(name, way) for name in conversions.SCRIPT for way in conversions.conversions(name)]
FREEZE = 8
SHORT = {
    "nanogpt": (
        "--max_iters=20 --warmup_iters=5 --eval_interval=20 --eval_iters=1",
        "--max_iters=30 --warmup_iters=5 --eval_interval=30 --eval_iters=1",
    ),
    "torchvision_reference": ("--epochs 2", "--epochs 3"),
    "dino": ("--epochs 2", "--epochs 3"),
    "mae_finetune": ("--epochs 2", "--epochs 3"),
    "mingpt": ("--max_epochs 1 --batch_size 32", "--max_epochs 2 --batch_size 32"),
    "muon_speedrun": ("--steps 20", "--steps 30"),
    "hf_trainer": (
        "--max_steps 20 --save_steps 20 --gradient_accumulation_steps 1",
        "--max_steps 30 --save_steps 20 --gradient_accumulation_steps 1",
    ),
    "accelerate_loop": ("--num_epochs 1 --checkpointing_steps 20", "--num_epochs 2 --checkpointing_steps 20"),
    "lightning_module": (
        "--max_epochs 1 --every_n_train_steps 20",
        "--max_epochs 2 --every_n_train_steps 100",
    ),
    "optax_loop": ("--steps 30 --eval_every 30", "--steps 40 --eval_every 40"),
    "mpi_adam": ("--steps 20 --save_every 20", "--steps 30 --save_every 30"),
}
"""Options of a run that saves after the freeze, and of one that goes on from there."""
RESUME = {"hf_trainer": ("--resume_from_checkpoint", "{out}/checkpoint-20")}
RESUME["accelerate_loop"] = ("--resume_from_checkpoint", "{out}/step_20")
TOLERANCE = 0.2
"""How much larger than the script's the mean loss of the last steps may be."""


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_conversion_changes_few_lines(name, way):
    diff = conversions.conversions(name)[way]
    most = {"hook": 2, "plain": 6, "model": 6}.get(way, 10)
    assert conversions.changed_lines(diff) <= most
    compile(conversions.applied(diff, (conversions.SCRIPTS / f"{name}.py").read_text()), name, "exec")


def test_changed_lines_counts_a_replaced_line_once():
    diff = "--- a\n+++ b\n@@ -1,4 +1,4 @@\n-a\n+b\n+c\n d\n-e\n@@ -9 +9 @@\n-f\n+g\n"
    assert conversions.changed_lines(diff) == 2 + 1 + 1


def test_a_diff_of_another_text_is_refused():
    diff = "--- a\n+++ b\n@@ -2,2 +2,2 @@\n b\n-c\n+d\n"
    assert conversions.applied(diff, "a\nb\nc\ne\n") == "a\nb\nd\ne\n"
    with pytest.raises(ValueError, match="line 3 is 'x'; the diff expected 'c'"):
        conversions.applied(diff, "a\nb\nx\ne\n")


RUN = """
import faulthandler, os, runpy, sys, warnings
import torch
import torch.distributed as dist
torch.manual_seed(0)  # as not every script does
faulthandler.dump_traceback_later(150, exit=True)
os.environ["MASTER_PORT"] = "{port}"  # torch finds the addresses of earlier jobs in a store
groups, destroy = [], dist.destroy_process_group
# The destructor of gloo's group joins a thread that may wait for the lock of Python, which the destructor holds.
dist.destroy_process_group = lambda group=None: (groups.append(dist.group.WORLD), destroy(group))
warnings.simplefilter("default")
sys.argv = {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def output(fork_server):
    """Run a script on two ranks: ``output(name, argv)``, what it printed."""

    def run(name, argv):
        launcher = conversions.SCRIPT[name].launcher
        if launcher == conversions.TORCHRUN:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            code = RUN.format(argv=argv, port=store.port)
            ranks = fork_server.run(2, code, timeout=200, whole_exit=False)
            assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.err for rank in ranks)
            return ranks[0].out
        command = [part.format(ranks=2) for part in launcher]
        job = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=200, check=False)
        assert job.returncode == 0, job.stderr
        return job.stdout

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, output):
    """Train a script, or a conversion of it, and go on from what it has saved: ``trained(name, way)``, losses."""

    @functools.cache
    def run(name, way):
        folder, script = tmp_path_factory.mktemp(f"{name}-{way}"), conversions.SCRIPT[name]
        text = (conversions.SCRIPTS / f"{name}.py").read_text()
        if way != conversions.ORIGINAL:
            text = conversions.applied(conversions.conversions(name)[way], text)
        code = folder / f"{name}.py"
        code.write_text(text.replace(f"freeze={conversions.FREEZE}", f"freeze={FREEZE}"))
        resume = RESUME.get(name, script.resume)
        found = []
        for own, more in zip(SHORT[name], ((), resume), strict=True):
            argv = [part.format(out=folder, ranks=2) for part in (*script.options, *own.split(), *more)]
            losses = map(conversions.loss_in, output(name, [str(code), *argv]).splitlines())
            found.append([loss for loss in losses if loss is not None])
        return found

    return run


def slow(name, way):
    first = next(iter(conversions.conversions(name)))
    return pytest.param(name, way, marks=pytest.mark.slow if way == first else pytest.mark.exhaustive)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "way"), [slow(*pair) for pair in WAYS])
def test_a_conversion_trains_and_resumes_as_its_script(trained, name, way):
    pytest.importorskip({"hf_trainer": "transformers", "accelerate_loop": "accelerate"}.get(name, "sklearn"))
    for ours, theirs in zip(trained(name, way), trained(name, conversions.ORIGINAL), strict=True):
        assert len(ours) == len(theirs) > 0
        assert fmean(ours[-5:]) < (1 + TOLERANCE) * fmean(theirs[-5:])
