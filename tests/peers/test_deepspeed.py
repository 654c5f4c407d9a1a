"""DeepSpeed's steps in NumPy against DeepSpeed itself, where DeepSpeed is installed: ``make test-peers``."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import numpy as np
import pytest

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]
NAMES = ("onebit_adam", "zero_one_adam", "onebit_lamb")
RELEASE = "0.19.6"


def installed() -> str | None:
    try:
        return version("deepspeed") if find_spec("deepspeed") else None
    except PackageNotFoundError:
        return None


@pytest.fixture(scope="module")
def recorded() -> dict:
    """The results of each world, recorded once for all optimizers."""
    return {}


@pytest.mark.skipif(installed() is None, reason="DeepSpeed is not installed: make test-peers")
@pytest.mark.parametrize("world", [1, 2, 3])
class TestOriginal:
    def test_the_installed_release_is_the_reproduced_one(self, world):
        assert installed() == RELEASE

    @pytest.mark.parametrize("name", NAMES)
    def test_same_trajectory(self, recorded, original, ours, distance, *, name, world):
        if world not in recorded:
            recorded[world] = original.record(world)
        apart = distance(name, recorded[world], ours(name, world))
        print(f"\n{name}, {world} ranks:", ", ".join(f"{kind} {d:.1e}" for kind, d in apart.items()))  # noqa: T201
        assert max(apart.values()) < 1e-6

    def test_a_new_recording_equals_the_committed_one(self, recorded, original, golden, world):
        if world not in recorded:
            recorded[world] = original.record(world)
        for now, then in zip(recorded[world], original.read(golden(world), world), strict=True):
            assert now.keys() == then.keys()
            for key, x in now.items():
                np.testing.assert_allclose(x, then[key], rtol=1e-6, atol=1e-6, err_msg=key)
