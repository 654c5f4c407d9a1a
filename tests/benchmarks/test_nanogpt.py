"""The race in nanoGPT's script: what is replaced in the script, and the table made from rows."""

import nanogpt
import pytest
from race.script import AS_WRITTEN, changed

LINES = """
    device = f'cuda:{ddp_local_rank}'
    torch.cuda.set_device(device)
torch.manual_seed(1337 + seed_offset)
    model = DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module if ddp else model
    destroy_process_group()
"""
"""The lines of train.py that are replaced."""


def rows_of(method, ends):
    """Return the trainings of a method by their rates; the best one has two seeds. Losses fall evenly."""
    best = min(ends, key=ends.get)
    about = {
        "task": "nanogpt",
        "ranks": 2,
        "method": method,
        "steps": 600,
        "commit": "abc",
    }
    return [
        about | {"rate": rate, "seed": seed, "losses": [(0, 5.0), (600, end)]}
        for rate, end in ends.items()
        for seed in range(2 if rate == best else 1)
    ]


def timed(method, seconds):
    about = {"method": method, "link": "1gbit", "machine": {"cores": 2}, "seconds": seconds}
    return [about | {"round": number} for number in range(3)]


def test_each_replaced_line_must_be_there_once():
    text = changed(LINES)
    assert "cuda" not in text
    assert "model, optimizer = PARALLEL(model, optimizer)" in text
    with pytest.raises(ValueError, match=r"train\.py has 0 lines like .*DDP.*; expected 1"):
        changed(LINES.replace("model = DDP", "model = FSDP"))
    with pytest.raises(ValueError, match=r"train\.py has 2 lines like"):
        changed(LINES + LINES)


def test_the_table_compares_at_the_best_rates_with_the_script_as_written(monkeypatch):
    monkeypatch.setattr(nanogpt, "CHOSEN", (AS_WRITTEN, "muon_4_1"))
    rows = rows_of(AS_WRITTEN, {1e-3: 2.1, 3e-3: 2.0, 9e-3: 2.2}) + timed(AS_WRITTEN, 0.4)
    rows += rows_of("muon_4_1", {1e-3: 2.5, 3e-3: 1.0, 9e-3: 2.0}) + timed("muon_4_1", 0.2)
    head, _, written, own, *_, last = nanogpt.tables(rows).splitlines()
    assert last == "The target is 2.000. nanoGPT at abc. Steps were timed with cores 2."
    assert written.startswith("| the script as it is | 0.003 | 2.000, 2.000 | 600 |")
    assert own.startswith("| qcomp: Muon, 4 + 1 bits | 0.003 | 1.000, 1.000 | 450 |")
    cells = dict(zip(head.split(" | "), own.split(" | "), strict=True))
    assert cells["1 Gbit/s"].startswith("2.67: ")  # 600 / 450 of the steps, twice as fast


def test_a_method_whose_best_rate_is_not_known_is_left_out():
    rows = rows_of(AS_WRITTEN, {1e-3: 2.1, 3e-3: 2.0, 9e-3: 2.2})
    assert "Muon" not in nanogpt.tables(rows + rows_of("muon_4_1", {1e-3: 2.5, 3e-3: 1.0}))
    assert nanogpt.tables([]) == "Not measured yet."


def test_a_method_that_misses_the_target_says_so(monkeypatch):
    monkeypatch.setattr(nanogpt, "CHOSEN", (AS_WRITTEN, "muon_4_1"))
    rows = rows_of(AS_WRITTEN, {1e-3: 2.1, 3e-3: 2.0, 9e-3: 2.2})
    rows += rows_of("muon_4_1", {1e-3: 2.5, 3e-3: 2.3, 9e-3: 2.4})
    assert "| not reached |" in nanogpt.tables(rows)
