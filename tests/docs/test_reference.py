"""The reference has a page for every public name; `make docs` also checks that the site has all these pages."""

import importlib.util
import pkgutil

import pytest

import qcomp
from tests.docs.pages import DOCS

for module in ("qcomp.jax.optax", "qcomp.torch.fsdp", "qcomp.torch.ft"):
    pytest.importorskip(module, exc_type=ImportError)

INTERNAL = {"cli", "copies", "core", "private_names", "version", "__main__"}
"""Modules at the top of the package that are not public: commands, and the parts of its public modules."""


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_at_the_top_is_public_or_known_to_be_internal(reference):
    there = {module.name for module in pkgutil.iter_modules(qcomp.__path__)} - INTERNAL
    assert there <= {name.removeprefix("qcomp.") for name in reference.public()}


def test_every_public_name_has_a_page(reference, tmp_path):
    reference.write(tmp_path / "api")
    for module, names in reference.public().items():
        page = (tmp_path / "api" / f"{module}.rst").read_text()
        for name in names:
            assert f":py:obj:`{name} <{module}.{name}>`\n" in page
            entry = (tmp_path / "api" / f"{reference.file_of(module, name)}.rst").read_text()
            assert f".. currentmodule:: {module}\n" in entry
            assert f":: {name}\n" in entry


def test_no_two_pages_differ_in_case_alone(reference, tmp_path):
    reference.write(tmp_path / "api")
    files = [path.name.lower() for path in (tmp_path / "api").iterdir()]
    assert len(set(files)) == len(files)


def test_public_names_that_are_not_modules_are_listed_under_the_package(reference):
    modules = {name.removeprefix("qcomp.") for name in reference.public()}
    assert set(reference.public()["qcomp"]) == set(qcomp.__all__) - modules


def test_each_name_has_a_summary(reference, tmp_path):
    reference.write(tmp_path / "api")
    for module in reference.public():
        assert "\n     - \n" not in (tmp_path / "api" / f"{module}.rst").read_text(), module


def test_submodules_may_have_public_names(reference):
    assert "release_memory" not in reference.public()["qcomp"]
    assert "hook" in reference.public()["qcomp.integrations.ddp"]
    assert "register" in reference.public()["qcomp.topologies"]
