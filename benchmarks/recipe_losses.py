"""Losses of the recipes for a mesh of JAX beside the exact mean, on tokens of very different frequency.

    python benchmarks/recipe_losses.py            # writes docs/benchmarks/recipes/
    python benchmarks/recipe_losses.py --table    # only writes the table, from the JSON

The training is that of `tests/jax_face/on_devices/recipes.py`, whose test compares the same losses with bounds.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import page
from timing import machine, rounded

PAGE = Path("docs/benchmarks/recipes")
STEPS = (100, 200)


def measured() -> dict[str, list[float]]:
    """Return the losses after some steps, by the text of each recipe."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import optax  # noqa: PLC0415 - needs the devices

    import qcomp.jax.optax  # noqa: PLC0415
    from tests.jax_face.on_devices import recipes  # noqa: PLC0415

    makers = {
        "`pmean`, `optax.adam`": optax.chain(recipes.exact_mean(), optax.adam(recipes.RATE)),
        "`compressed(MinMaxUInt8())`, `optax.adam`": recipes.compressed(qcomp.MinMaxUInt8()),
        "`compressed(QSGD(7, 128), feedback=False)`, `optax.adam`": recipes.compressed(
            qcomp.QSGD(7, 128), feedback=False
        ),
        "`compressed(QSGD(7, 128))`, `optax.adam`": recipes.compressed(qcomp.QSGD(7, 128)),
        "`onebit_adam`, frozen after 50 steps": qcomp.jax.optax.onebit_adam(
            recipes.RATE, 50, "data", b2=0.99, exact=None
        ),
        "`compressed(ScaledSign())`, `optax.adam`": recipes.compressed(qcomp.ScaledSign()),
    }
    found = {}
    for name, tx in makers.items():
        found[name] = [rounded(recipes.trained(tx, steps)) for steps in STEPS]
        print(name, found[name], flush=True)
    return found


def main() -> None:
    """Train, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only write the table, from the JSON")
    path = PAGE / "recipes.json"
    if not parser.parse_args().table:
        path.write_text(json.dumps({"machine": machine(), "losses": measured()}, indent=1) + "\n")
    losses = json.loads(path.read_text())["losses"]
    exact = next(iter(losses.values()))[-1]
    rows = [[name, *(f"{x:.4f}" for x in xs), f"{xs[-1] / exact:.2f}"] for name, xs in losses.items()]
    head = ["recipe", *(f"loss after {steps} steps" for steps in STEPS), "over the exact mean's"]
    page.rewrite(PAGE, {"losses": page.table(head, rows)})


if __name__ == "__main__":
    main()
