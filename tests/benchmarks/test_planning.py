"""The cost model against published and measured figures, and the page that shows the comparison."""

import shlex
from pathlib import Path

import planning
import pytest

import qcomp
from qcomp.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "planning" / "README.md"


@pytest.mark.parametrize("profile", planning.PROFILES, ids=lambda p: f"{p.nodes} nodes, {p.samples}")
def test_the_ring_takes_the_published_time(profile):
    assert 1 < planning.stage(profile).allreduce / profile.allreduce < 1.25


def test_the_compressed_stage_and_a_run_have_the_published_speedups():
    """At 64 GPUs without accumulation; the page says which plain step each figure is relative to."""
    single, usual, accumulated = (planning.stage(p) for p in planning.PROFILES[:3])
    for found in (single, usual):
        assert found.over_measured == pytest.approx(6.6, rel=0.10)
        assert found.speedup == pytest.approx(6.6, rel=0.30)
    assert usual.speedup == pytest.approx(6.6, rel=0.25)
    for found in (single, usual, accumulated):
        assert found.run == pytest.approx(3.3, rel=0.25)


def test_a_node_with_the_bandwidth_of_one_connection_contradicts_the_publication():
    """This is why the model has streams: without them it contradicts the published figures."""
    assert planning.stage(planning.PROFILES[1], streams=1.0).speedup == pytest.approx(3.4, abs=0.05)


def test_the_share_of_communication_follows_from_the_published_speedup():
    shares = [planning.needed_share(1.8, qcomp.QSGD(levels=s), 60_200_000) for s in (7, 127)]
    assert [f"{share:.0%}" for share in shares] == ["51%", "59%"]
    # Putting the share back gives the speed-up.
    ratio = 4 / (qcomp.QSGD(levels=7).payload_spec(60_200_000).nbytes / 60_200_000)
    assert 1 / (1 - shares[0] + shares[0] / ratio) == pytest.approx(1.8)


@pytest.mark.parametrize("step", planning.STEPS, ids=lambda s: f"{s.model} {s.ranks} {s.link} {s.half}")
def test_measured_steps_are_predicted_within_a_fifth(step):
    assert planning.predicted(step, qcomp.planning.CPU) == pytest.approx(step.seconds, rel=0.20)


def test_the_page_shows_the_computed_tables():
    text = PAGE.read_text()
    for name, content in {
        "published": planning.published_table(),
        "measured": planning.measured_table(),
        "example": f"```text\n{planning.example().text}\n```",
    }.items():
        assert f"<!-- {name} -->\n{content}\n<!-- end of {name} -->" in text


def test_the_example_is_the_output_of_the_command_on_the_page(capsys):
    command = next(
        line for line in PAGE.read_text().splitlines() if line.startswith("    qcomp plan --params")
    )
    assert main([*shlex.split(command.partition(" --picture")[0])[1:]]) == 0
    assert capsys.readouterr().out == planning.example().text + "\n"


def test_the_program_writes_the_page(run_program):
    out = run_program(planning)
    assert (out / "plan.png").stat().st_size > 10_000
