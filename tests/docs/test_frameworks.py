"""Each recipe of the page on frameworks trains on two ranks, saves, and goes on from what it has saved."""

import re

import pytest

from tests.docs import pages
from tests.docs.pages import DOCS

pytest.importorskip("torch")

HEAD, *SECTIONS = re.split("^## ", (DOCS / "frameworks.md").read_text(), flags=re.MULTILINE)
RECIPES = {
    section.partition("\n")[0]: "\n".join(
        code for language, code in pages.FENCE.findall(section) if language == "python"
    )
    for section in SECTIONS
    if "```python" in section
}
NEEDS = {
    "Accelerate": "accelerate",
    "Trainer of Hugging Face": "transformers",
    "Lightning": "lightning",
    "Fabric": "lightning",
}
RUN = """
import faulthandler, os, warnings
faulthandler.dump_traceback_later(150, exit=True)
os.chdir({folder!r})
warnings.simplefilter("default")
os.environ["MASTER_PORT"] = "{port}"  # torch finds the addresses of earlier jobs in a store
{head}
{recipe}
inside = getattr(optimizer, "optimizer", optimizer)
state = inside.core_state
own = torch.cat([p.detach().flatten() for group in inside.param_groups for p in group["params"]])
others = [torch.empty_like(own) for _ in range(2)]
torch.distributed.all_gather(others, own)
assert torch.equal(*others)
print(state.stage, state.step, state.size, inside._overlapped is not None)
"""
OPTIMIZER = {
    "Trainer of Hugging Face": "optimizer = trainer.optimizer",
    "Lightning": "(optimizer,) = trainer.optimizers",
    "Two optimizers, as in a GAN": "optimizer = theirs",
}
STEPS = {"Accelerate": 32, "Trainer of Hugging Face": 60, "Lightning": 96, "Fabric": 32}
"""The steps that an optimizer has made at the end, some before and some after it was loaded."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_resumes(fork_server, name, tmp_path):
    dist = pytest.importorskip("torch.distributed")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    head = "\n".join(code for _, code in pages.FENCE.findall(HEAD))
    recipe = RECIPES[name] + OPTIMIZER.get(name, "")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = RUN.format(folder=str(tmp_path), port=store.port, head=head, recipe=recipe)
    ranks = fork_server.run(2, code, timeout=200, whole_exit=False)
    assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.err for rank in ranks)
    assert {rank.out.splitlines()[-1] for rank in ranks} == {f"compressed {STEPS.get(name, 30)} 2 True"}


def test_recipes_are_found():
    assert RECIPES.keys() == {*NEEDS, "Two optimizers, as in a GAN"}
