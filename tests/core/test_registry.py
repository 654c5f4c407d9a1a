"""Compressors by name: spec strings, errors in them, and entry points."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp.core import registry

BUCKETS = st.sampled_from([8, 64, 4096, 65536])
SIGNS = st.builds(qcomp.ScaledSign, bucket_size=BUCKETS, scale=st.sampled_from(["l1", "rms"]))
QSGDS = st.builds(
    qcomp.QSGD, levels=st.integers(1, 127), bucket_size=BUCKETS, norm=st.sampled_from(["max", "l2"])
)
COMPRESSORS = st.one_of(
    SIGNS,
    QSGDS,
    st.builds(qcomp.LloydMax, bits=st.integers(1, 4), bucket_size=BUCKETS),
    st.builds(qcomp.LloydMax, bits=st.integers(2, 4), bucket_size=BUCKETS, coding=st.just("range")),
    st.builds(qcomp.MinMaxUInt8, bucket_size=BUCKETS),
    st.builds(qcomp.Cast, dtype=st.sampled_from(["float16", "bfloat16"])),
    st.just(qcomp.Identity()),
    st.builds(qcomp.Scaled, QSGDS),
    st.just(qcomp.Scaled(qcomp.Identity())),
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(COMPRESSORS)
def test_spec_strings_round_trip(c):
    assert str(c) == c.spec
    assert qcomp.compressor(c.spec) == c
    assert qcomp.compressor(c.spec).spec == c.spec


@settings(derandomize=True, deadline=None, max_examples=100)
@given(COMPRESSORS, COMPRESSORS)
def test_specs_are_equal_exactly_where_compressors_are(one, other):
    assert (one.spec == other.spec) == (one == other)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sign", qcomp.ScaledSign()),
        ("sign:scale=rms", qcomp.ScaledSign(scale="rms")),
        ("qsgd:norm=l2,levels=3", qcomp.QSGD(levels=3, norm="l2")),
        ("minmax", qcomp.MinMaxUInt8()),
        ("lloyd_max:bits=3,coding=range", qcomp.LloydMax(3, coding="range")),
        ("cast", qcomp.Cast()),
        ("identity", qcomp.Identity()),
        ("scaled(qsgd)", qcomp.Scaled(qcomp.QSGD())),
        ("scaled(qsgd:levels=1,bucket_size=8)", qcomp.Scaled(qcomp.QSGD(levels=1, bucket_size=8))),
    ],
)
def test_omitted_options_have_their_defaults(spec, expected):
    assert qcomp.compressor(spec) == expected


def test_the_text_of_specs_is_fixed():
    """Golden files and handshakes compare specs as text."""
    assert qcomp.ScaledSign().spec == "sign:bucket_size=4096,scale=l1"
    assert qcomp.QSGD().spec == "qsgd:levels=7,bucket_size=512,norm=max"
    assert qcomp.Scaled(qcomp.QSGD()).spec == "scaled(qsgd:levels=7,bucket_size=512,norm=max)"
    assert qcomp.Identity().spec == "identity"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "there is no compressor ''; known: .*identity.* pass it to qcomp.register"),
        (
            "sgin",
            "there is no compressor 'sgin'; known: .*cast, .*identity, .*minmax, .*qsgd, .*scaled, .*sign",
        ),
        ("sign:levels=7", "option 'levels=7'; sign has: bucket_size, scale"),
        ("identity:levels=7", "option 'levels=7'; identity has: none"),
        ("qsgd:levels", "option 'levels'; qsgd has: levels, bucket_size, norm"),
        ("qsgd:levels=many", "has levels='many'; expected a value of type int"),
        ("qsgd:levels=7.0", "has levels='7.0'; expected a value of type int"),
        ("qsgd:levels=", "has levels=''; expected a value of type int"),
        ("qsgd:levels=0", "levels is 0; expected an integer from 1 to 127"),
        ("qsgd:levels=128", "levels is 128; expected an integer from 1 to 127"),
        ("qsgd:bucket_size=100", "bucket_size is 100; expected a power of two"),
        ("qsgd:norm=l3", "norm is 'l3'; expected 'max' or 'l2'"),
        ("sign:scale=l2", "scale is 'l2'; expected 'l1' or 'rms'"),
        ("cast:dtype=float8", "dtype is 'float8'; expected 'bfloat16' or 'float16'"),
        ("qsgd:levels=7,levels=8", "gives levels twice"),
        ("scaled", "lacks compressor"),
        ("scaled()", "lacks compressor"),
        ("scaled(qsgd", "unbalanced parentheses"),
        ("scaled(qsgd)x", "unbalanced parentheses"),
        ("scaled(qsgd:levels=x)", "has levels='x'"),
        ("scaled(qsgd):factor=2", "option 'factor=2'; scaled has: none"),
        ("scaled(sign)", "compressor is sign:.*; expected an unbiased compressor with a known omega"),
        ("scaled(scaled(qsgd))", "compressor is scaled.*; expected an unbiased compressor"),
        ("sign(qsgd)", "the compressor 'sign' wraps no other compressor"),
        ("scaled:compressor=qsgd", "option 'compressor=qsgd'"),
        ("sign:bucket_size=" + "0" * 1000, "has 1017 characters; at most 1000 are read"),
        ("scaled(" * 2000 + ")" * 2000, "has 16000 characters"),
        ("scaled(" * 120 + ")" * 120, "lacks compressor"),
        ("scaled(" * 120, "unbalanced parentheses"),
        ("scaled(" * 110 + "qsgd" + ")" * 110, "expected an unbiased compressor"),
    ],
)
def test_errors_say_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=message):
        qcomp.compressor(spec)


def test_names():
    assert {"cast", "identity", "minmax", "qsgd", "scaled", "sign"} <= set(qcomp.compressor_names())
    assert qcomp.compressor_names() == sorted(qcomp.compressor_names())


def test_every_compressor_of_the_package_is_registered():
    from qcomp.core import compressors

    for name in compressors.__all__:
        cls = getattr(compressors, name)
        assert registry._classes[cls.name] is cls


@dataclass(frozen=True)
class Wrapper(qcomp.Compressor):
    """A compressor around another one, with an option of every kind."""

    name: ClassVar[str] = "wrapper"

    compressor: qcomp.Compressor
    count: int = 1
    factor: float = 0.5
    flag: bool = False
    word: str = "a"

    @property
    def traits(self) -> qcomp.Traits:
        return self.compressor.traits

    def payload_spec(self, size: int, dtype: str = "float32") -> qcomp.PayloadSpec:
        return self.compressor.payload_spec(size, dtype)

    def encode(self, x: Any, key: qcomp.Key | None) -> Mapping[str, Any]:
        return self.compressor.encode(x, key)

    def decode(self, parts: Mapping[str, Any], size: int, dtype: Any) -> Any:
        return self.compressor.decode(parts, size, dtype)


class TestRegister:
    @pytest.fixture(autouse=True)
    def _registry_of_its_own(self, monkeypatch):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    def test_options_of_every_kind_and_nesting(self):
        assert qcomp.register(Wrapper) is Wrapper
        c = Wrapper(Wrapper(qcomp.QSGD(), flag=True, factor=1e-3), count=-2, word="b")
        assert c.spec == (
            "wrapper(wrapper(qsgd:levels=7,bucket_size=512,norm=max):count=1,factor=0.001,flag=True,word=a)"
            ":count=-2,factor=0.5,flag=False,word=b"
        )
        assert qcomp.compressor(c.spec) == c
        assert qcomp.compressor(f"scaled({c.spec})") == qcomp.Scaled(c)
        with pytest.raises(ValueError, match="has flag='yes'; expected a value of type bool"):
            qcomp.compressor("wrapper(qsgd):flag=yes")
        with pytest.raises(ValueError, match="has factor='x'; expected a value of type float"):
            qcomp.compressor("wrapper(qsgd):factor=x")

    def test_deep_nesting_works_up_to_the_maximal_length(self):
        qcomp.register(Wrapper)
        c, depth = Wrapper(qcomp.QSGD()), 1
        while len(Wrapper(c).spec) <= 1000:
            c, depth = Wrapper(c), depth + 1
        spec = "wrapper(" * depth + "qsgd" + ")" * depth
        assert qcomp.compressor(spec) == qcomp.compressor(c.spec) == c
        longer = Wrapper(c)
        with pytest.raises(ValueError, match=r"characters with all its options; at most 1000 are read"):
            qcomp.compressor(f"wrapper({spec})")
        with pytest.raises(
            ValueError, match=r"^compressor has a spec string of 10\d\d characters; at most 1000 are"
        ):
            qcomp.Payload(longer.spec, 0, "float32", np.zeros(0, np.uint8)).to_bytes()

    def test_registering_twice_is_fine_and_a_clash_is_an_error(self):
        qcomp.register(Wrapper)
        qcomp.register(Wrapper)

        class Other(Wrapper):
            name = "qsgd"

        with pytest.raises(ValueError, match=r"Other has the name 'qsgd', which QSGD already has"):
            qcomp.register(Other)
        assert qcomp.compressor("qsgd") == qcomp.QSGD()

    def test_compressors_are_immutable_and_can_be_replaced(self):
        c = qcomp.QSGD()
        with pytest.raises(AttributeError):
            c.levels = 3
        assert replace(c, levels=3).spec == "qsgd:levels=3,bucket_size=512,norm=max"


PLUGIN = """
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import qcomp

print("imported", __name__)


@dataclass(frozen=True)
class Halve(qcomp.Identity):
    name: ClassVar[str] = "halve"
    times: int = 1
"""


def install(folder: Path, distribution: str, **points: str) -> None:
    """Put a package with entry points into a folder, as an installer would."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[qcomp.compressors]\n" + "".join(lines))
    (folder / f"{distribution}.py").write_text(PLUGIN)


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\nimport qcomp\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


class TestEntryPoints:
    def test_an_installed_package_needs_no_call(self, tmp_path):
        install(tmp_path, "plugin", halve="plugin:Halve")
        out = run(
            tmp_path,
            "print('halve' in qcomp.compressor_names(), 'plugin' in sys.modules)\n"
            "qcomp.compressor('sign'); print('plugin' in sys.modules)\n"
            "c = qcomp.compressor('halve:times=3'); print(c, c == qcomp.compressor(c.spec))\n",
        )
        assert out.splitlines() == ["True False", "False", "imported plugin", "halve:times=3 True"]

    @pytest.mark.slow
    def test_two_packages_with_one_name_are_an_error(self, tmp_path):
        install(tmp_path, "plugin", halve="plugin:Halve")
        install(tmp_path, "other", halve="other:Halve")
        for code in ("qcomp.compressor('halve')", "qcomp.compressor_names()"):
            assert "ValueError: compressor 'halve' is offered by" in run(tmp_path, code)
        out = run(tmp_path, "qcomp.compressor('halve')")
        assert "plugin:Halve of plugin" in out
        assert "other:Halve of other" in out
        assert run(tmp_path, "print(qcomp.compressor('identity'))") == "identity\n"

    @pytest.mark.slow
    def test_a_name_of_the_package_itself_is_an_error(self, tmp_path):
        install(tmp_path, "plugin", qsgd="plugin:Halve")
        out = run(tmp_path, "qcomp.compressor('halve')")
        assert (
            "plugin:Halve of plugin offers compressor 'qsgd', but qcomp.core.compressors.qsgd.QSGD already has"
            in out
        )
        assert run(tmp_path, "print(qcomp.compressor('qsgd'))") == "qsgd:levels=7,bucket_size=512,norm=max\n"

    def test_an_entry_point_must_have_the_name_of_its_class(self, tmp_path):
        install(tmp_path, "plugin", third="plugin:Halve")
        assert "ValueError" in run(tmp_path, "qcomp.compressor('third')")


def test_two_compressors_as_fields_have_no_place_in_a_spec():
    """The second would be missing from it, and another rank would decode with another one."""

    @dataclass(frozen=True)
    class Twice(qcomp.Scaled):
        name: ClassVar[str] = "twice_of_test"
        second: qcomp.Compressor = qcomp.Identity()  # noqa: RUF009 - immutable

    with pytest.raises(TypeError, match="Twice has 2 compressors as fields; expected at most one"):
        Twice(qcomp.QSGD(levels=1)).spec  # noqa: B018 - raises
