"""A third-party package registers by entry points; it needs no import and no call."""

import json
import os
import subprocess
import sys

import pytest

PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar

from qcomp import extend


@extend.register_compressor
@dataclass(frozen=True)
class Halve(extend.BucketedCompressor):
    """The sign of each element, and half of the largest magnitude of each bucket."""

    name: ClassVar[str] = "halve"
    scales: ClassVar[tuple[str, ...]] = ("half",)
    bucket_size: int = 64

    @property
    def traits(self):
        return extend.Traits(self.bucket_size)

    @property
    def bits(self):
        return 1

    def encode_block(self, rows, block, key):
        xp = extend.array_namespace(rows)
        return xp.astype(rows < 0, xp.uint8), (xp.max(xp.abs(rows), axis=1) * 0.5,)

    def decode_block(self, codes, scales):
        (half,) = scales
        return extend.array_namespace(codes).where(codes == 1, -half, half)


class Gather(extend.Topology):
    """Every rank sends its payload to all."""

    name = "gather_of_plugin"
    roundings = 1

    def lay_out(self, operands, chunks=None):
        (whole,) = operands.chunks(1)
        return extend.Layout(operands, (whole,), extend.Residuals(operands.whole, ()))

    def stages(self, call):
        layout, codec = call.layout, extend.Codec(call.values)
        (frame,), verdicts = layout.frames, extend.Verdicts(at_once=layout.operands.variable_length)
        sent = codec.encode(layout.frames, call.values, call.worker, call.key.at(hop=0), donate=False)
        arrived = yield extend.AllGather(sent.messages[0], (frame.nbytes,) * layout.world)
        opened = codec.open(arrived, (frame,) * layout.world, verdicts, sent.error)
        verdicts.require_accepted(sent.error)
        if call.places is None:  # arrays are immutable
            means = extend.assemble(layout.chunks, [codec.average(opened)], call.values)
        else:
            means = call.places
            codec.average(opened, means)
        return extend.Averaged(means, sent.residuals, ())

    def cost(self, load, cluster):
        codec = (load.encode + cluster.ranks * load.add) * load.packed
        others = cluster.ranks - 1
        wire = cluster.link.seconds(others * load.payload, ranks=1, messages=others)
        return extend.Cost(codec, wire, others * load.payload)


class Kernels:
    """Kernels that support nothing."""

    name = "none_of_plugin"

    def takes(self, x):
        return True


KERNELS = Kernels()
'''
POINTS = {
    "qcomp.compressors": {"halve": "plugin_of_test:Halve"},
    "qcomp.topologies": {"gather_of_plugin": "plugin_of_test:Gather"},
    "qcomp.kernels": {"none_of_plugin": "plugin_of_test:KERNELS"},
}


def install(folder, distribution="plugin-of-test", points=POINTS, source=PLUGIN):
    """Put a package into a folder, as an installer would."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of_group.items())
        for group, of_group in points.items()
    )
    (info / "entry_points.txt").write_text(text)
    (folder / "plugin_of_test.py").write_text(source)
    return folder


@pytest.fixture
def python(tmp_path):
    """Run Python where the plugin is installed: ``python(*args)``."""

    def run(*args, folder=tmp_path):
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, "-W", "error", *args],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


USED = """
import sys
import numpy as np
import qcomp

assert "plugin_of_test" not in sys.modules
assert "gather_of_plugin" not in qcomp.topologies.names()  # "auto" does not select it
mean = qcomp.CompressedMean(qcomp.compressor("halve:bucket_size=8"), "gather_of_plugin")
assert type(mean.compressor).__module__ == "plugin_of_test"

def rank_main(comm):
    x = np.full(20, 1.0 + comm.rank, dtype=np.float32)
    found, _ = mean(x, mean.init(x, comm), comm)
    return found.tolist()

print(qcomp.comm.run_local(2, rank_main)[0] == [0.75] * 20)
with qcomp.backends.use("none_of_plugin"):
    print(qcomp.backends.explain(np.ones(3)).kernels, qcomp.compressor("halve").compress(np.ones(9)).nbytes)
"""


def test_registered_objects_are_found_by_name(python, tmp_path):
    install(tmp_path)
    done = python("-c", USED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "none_of_plugin 8"]


def test_an_imported_package_does_not_clash_with_its_own_entry_points(python, tmp_path):
    install(tmp_path)
    code = "import qcomp, plugin_of_test; print(qcomp.compressor('halve') == plugin_of_test.Halve()); "
    done = python("-c", code + "qcomp.topologies.register(plugin_of_test.Gather())")
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.slow
def test_info_lists_it(python, tmp_path):
    install(tmp_path)
    done = python("-m", "qcomp", "info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [(p["kind"], p["name"], p["source"], p["problem"]) for p in facts["plugins"]] == [
        ("compressor", "halve", "plugin_of_test:Halve of plugin-of-test", None),
        ("topology", "gather_of_plugin", "plugin_of_test:Gather of plugin-of-test", None),
        ("kernel set", "none_of_plugin", "plugin_of_test:KERNELS of plugin-of-test", None),
    ]
    assert {"name": "none_of_plugin", "available": True, "reason": "available"} in facts["kernels"]


@pytest.mark.slow
def test_info_names_entry_points_that_cannot_be_loaded(python, tmp_path):
    install(tmp_path, source="import no_such_module\n")
    done = python("-m", "qcomp", "info")
    assert done.returncode == 1
    problems = [line for line in done.stdout.splitlines() if "cannot be loaded" in line]
    assert len(problems) == 3
    assert all("ModuleNotFoundError: No module named 'no_such_module'" in line for line in problems)
    assert "numpy on cpu" in done.stdout


@pytest.mark.slow
def test_check_accepts_names_from_a_plugin(python, tmp_path):
    install(tmp_path)
    commands = [
        ["check", "halve:bucket_size=16", "--law", "zero_gives_zero"],
        ["check", "gather_of_plugin", "--law", "ranks_agree"],
        ["bench", "--compressor", "halve", "--elements", "1000", "--rounds", "1"],
    ]
    done = python("-c", f"from qcomp.cli import main\nprint([main(each) for each in {commands}])")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"  ok      zero_gives_zero", "  ok      ranks_agree", "[0, 0, 0]"} <= set(lines)
    assert any(line.startswith("halve:bucket_size=64 ") for line in lines)


@pytest.mark.exhaustive
def test_everything_that_the_plugin_registers_keeps_its_contract(python, tmp_path):
    install(tmp_path)
    for target in ("halve", "gather_of_plugin"):
        done = python("-m", "qcomp", "check", target)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            {"qcomp.compressors": {"halve": "plugin_of_test:Gather"}},
            "expected a subclass of qcomp.Compressor",
        ),
        ({"qcomp.compressors": {"other": "plugin_of_test:Halve"}}, "leads to Halve, whose name is 'halve'"),
        (
            {"qcomp.topologies": {"other": "plugin_of_test:Gather"}},
            "expected a qcomp.topologies.Topology of that name",
        ),
        ({"qcomp.topologies": {"ring": "plugin_of_test:Gather"}}, "offers topology 'ring', but"),
        ({"qcomp.compressors": {"halve": "plugin_of_test:None_"}}, "None_"),
    ],
)
def test_wrong_entry_points_are_named(python, tmp_path, points, message):
    install(tmp_path, points=points)
    ((group, entries),) = points.items()
    (name,) = entries
    call = "compressor" if group == "qcomp.compressors" else "topologies.topology"
    asked = "nothing" if name == "ring" else name
    done = python("-c", f"import qcomp; qcomp.{call}({asked!r})")
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow
def test_two_packages_with_one_topology_are_an_error(python, tmp_path):
    install(tmp_path)
    install(
        tmp_path, "other-plugin", points={"qcomp.topologies": {"gather_of_plugin": "plugin_of_test:Gather"}}
    )
    done = python("-c", "import qcomp; qcomp.topologies.topology('gather_of_plugin')")
    assert "topology 'gather_of_plugin' is offered by" in done.stderr
    assert "remove one of them" in done.stderr
