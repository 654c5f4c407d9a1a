"""Later versions read, load and name what earlier ones have written, saved and named; and nobody rewrites it."""

import json
import subprocess
import warnings
from pkgutil import resolve_name

import numpy as np
import pytest
from packaging.version import Version

import qcomp
from qcomp.core import deprecations
from qcomp.core.deprecations import FORMER, Former
from tests import record_golden, record_vectors, releases
from tests.golden.names import FRAMEWORKS
from tests.golden.test_golden import OPTIONAL, in_root
from tests.releases import ReleasedError

GONE = ("qcomp.backends.KernelSet.", "qcomp.compat.", "qcomp.extend.AnyFrame.", "qcomp.extend.Partial.")
"""DeepSpeed's steps, members that kernel sets no longer inherit, since they need no base class, and fields that only
objects have."""
HOLDERS = {"qcomp.OuterLoop": qcomp.OuterLoop(every=4)}
"""Objects of the classes whose attributes are old names."""
STABLE = {
    f"{module}.{name}"
    for version in releases.versions("names")
    if Version(version) >= Version("1.0.0rc1")
    for module, names in releases.content("names", version).items()
    for name in names
}
"""The names that a release has had."""
CURRENT = f"v{qcomp.__version__}"


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    """Make this process forget of what it has warned."""
    monkeypatch.setattr(deprecations, "_told", set())


def reach(name):
    """Return what a dotted name leads to, as an expression in a script would, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value, path = qcomp, "qcomp"
        for part in name.split(".")[1:]:
            value, path = getattr(HOLDERS.get(path, value), part), f"{path}.{part}"
    return value, caught


def unreachable(names):
    """Yield the names that lead nowhere, or warn although they are not old."""
    for name in names:
        try:
            caught = reach(name)[1]
        except AttributeError:
            yield name
            continue
        if caught and name not in FORMER:
            yield f"{name}: {caught[0].message}"


def names_in(version, root):
    found = releases.content("names", version)
    dotted = [
        f"{module}.{name}" for module, names in found.items() if in_root(module, root) for name in names
    ]
    return [name for name in dotted if not name.startswith(GONE)]


@pytest.mark.parametrize("version", releases.versions("names"))
@pytest.mark.parametrize(
    "root", ["qcomp", *(pytest.param(f"qcomp.{name}", marks=pytest.mark.slow) for name in FRAMEWORKS)]
)
def test_every_name_that_a_version_had_still_leads_somewhere(root, version):
    for module in () if root == "qcomp" else OPTIONAL:
        pytest.importorskip(module, exc_type=ImportError)
    names = names_in(version, root)
    assert names
    assert list(unreachable(names)) == []


def test_a_name_that_is_missing_in_the_table_is_noticed(monkeypatch):
    monkeypatch.delitem(FORMER, "qcomp.extend.Partial")
    assert list(unreachable(names_in("0.1.0", "qcomp"))) == ["qcomp.extend.Partial"]


def arguments(described):
    """Return the arguments that a description lists, each with whether it has a default; None if it lists none."""
    text, depth, found = described.partition(" | ")[0], 0, [""]
    if not text.startswith("("):
        return None
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return {
        name.strip(): bool(equals)
        for name, equals, _ in (each.partition("=") for each in found if each.strip())
    }


def refused(old, new):
    """Return the arguments that calls could pass, by place or by name, and no longer can; and those they lack now."""
    before, now = arguments(old), arguments(new)
    if before is None or now is None:
        return []
    places, names = list(before), list(now)
    by_place = places[: places.index("*")] if "*" in places else places
    moved = [
        each
        for place, each in enumerate(by_place)
        if "*args" not in now and names[place : place + 1] != [each]
    ]
    lost = [each for each in before if each not in now and "**kwargs" not in now and each not in ("*", "/")]
    lacking = [
        each for each in now if not now[each] and each not in before and not each.startswith(("*", "/"))
    ]
    return sorted({*moved, *lost, *lacking})


@pytest.mark.parametrize(
    "version", [v for v in releases.versions("names") if Version(v) >= Version("1.0.0rc1")]
)
def test_calls_that_a_version_took_are_taken(version):
    now = releases.content("names", releases.versions("names")[-1])
    for module, names in releases.content("names", version).items():
        for name, described in names.items():
            assert refused(described, now.get(module, {}).get(name, "")) == [], f"{module}.{name}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("(x, key=None, *, out) | help 0", "(x, key=(1, 2), more=3, *, out, other={'a': 1}) | help 1", []),
        ("(x, key=None) | help 0", "(x, *args, **kwargs) | help 0", []),
        ("(x, key=None) | help 0", "the same as qcomp.Adam", []),
        ("(x, key=None) | help 0", "(x, size=0, key=None) | help 0", ["key"]),
        ("(x, key=None) | help 0", "(x, *, key=None) | help 0", ["key"]),
        ("(x, *, key=None) | help 0", "(x, *, draw=None) | help 0", ["key"]),
        ("(x) | help 0", "(x, *, key) | help 0", ["key"]),
    ],
)
def test_arguments_that_are_lost_moved_or_needed_are_noticed(old, new, expected):
    assert refused(old, new) == expected


def faults(old, new, goes):
    """Yield what is wrong with an entry of the table."""
    module = old.rpartition(".")[0]
    holder = reach(module)[0]
    if old.rpartition(".")[2] in getattr(holder, "__all__", ()):
        yield "is public still"
    if new in FORMER and new != old:
        yield "leads to another old name"
    if new.startswith("qcomp.core.") or "._" in new:
        yield "leads to a private name"
    if Version(goes) <= Version(qcomp.__version__):
        yield "should be gone"
    if old in STABLE and Version(goes).release != (Version(goes).major,):
        yield "goes before a new major version"
    try:
        value, caught = reach(old)
        again = reach(old)[1]
        expected = resolve_name(new) if not HOLDERS.get(module) else reach(new)[0]
    except AttributeError:
        yield "leads nowhere"
        return
    if value is not expected:
        yield "leads elsewhere"
    text = f"{old} is now called {new.removeprefix('builtins.')}; release {goes} removes the old name"
    if [(each.category, each.filename, str(each.message)) for each in caught] != [
        (DeprecationWarning, __file__, text)
    ]:
        yield "does not warn of itself at the user's line"
    if again:
        yield "warns again"


@pytest.mark.parametrize("old", FORMER)
def test_old_names_work_and_warn_once(old):
    assert list(faults(old, *FORMER[old])) == []


@pytest.mark.parametrize(
    ("old", "new", "goes", "fault"),
    [
        ("qcomp.extend.Older", "qcomp.extend.Nothing", "9", "leads nowhere"),
        ("qcomp.outer.older", "qcomp.outer.diloco", "9", "leads nowhere"),
        ("qcomp.OuterLoop.older", "qcomp.OuterLoop.outer", "9", "leads nowhere"),
        ("qcomp.extend.Frame", "qcomp.Adam", "9", "is public still"),
        ("qcomp.extend.Older", "qcomp.extend.Partial", "9", "leads to another old name"),
        ("qcomp.extend.Older", "qcomp.core.numeric.arrays.divide", "9", "leads to a private name"),
        ("qcomp.extend.Older", "qcomp.Adam", qcomp.__version__, "should be gone"),
        ("qcomp.Adam", "qcomp.Lamb", "9.1", "goes before a new major version"),
    ],
)
def test_a_broken_table_is_noticed(monkeypatch, old, new, goes, fault):
    monkeypatch.setitem(FORMER, old, Former(new, goes))
    assert fault in list(faults(old, new, goes))


def test_a_warning_in_another_file_or_a_second_one_is_noticed(monkeypatch):
    def told(old):
        warnings.warn(f"{old} is old", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(deprecations, "_tell", told)
    assert list(faults("qcomp.extend.Partial", *FORMER["qcomp.extend.Partial"])) == [
        "does not warn of itself at the user's line",
        "warns again",
    ]


def test_an_import_names_the_line_of_the_script(monkeypatch):
    monkeypatch.setitem(FORMER, "qcomp.Older", Former("qcomp.Adam", "9"))
    script = compile("import qcomp\n\nfrom qcomp import Older\nfrom qcomp import Older", "script.py", "exec")
    with pytest.warns(DeprecationWarning, match=r"qcomp.Older is now called qcomp.Adam") as caught:
        exec(script, namespace := {})
    assert [(each.filename, each.lineno) for each in caught] == [("script.py", 3)]
    assert namespace["Older"] is qcomp.Adam


def test_where_warnings_are_errors_every_use_is_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(DeprecationWarning):
                qcomp.extend.Partial  # noqa: B018


@pytest.mark.parametrize("version", releases.versions("payloads"))
def test_payloads_of_every_version_decode_to_the_same_bits(version):
    for name, record in releases.content("payloads", version).items():
        like = np.zeros(77, dtype=name.rpartition(" ")[2])
        payload = qcomp.Payload.from_bytes(bytes.fromhex(record["bytes"]), like=like)
        decoded = qcomp.compressor(payload.compressor).decompress(payload, like=like)
        assert decoded.tobytes().hex() == record["decoded"], name


def test_the_folders_are_of_versions_until_now_and_have_no_other_files():
    assert Version(releases.versions()[-1]) <= Version(qcomp.__version__)
    assert {path.stem for path in releases.GOLDEN.glob("*/*.json")} == set(record_golden.OF_VERSIONS)


@pytest.fixture
def released(tmp_path):
    """A repository with a tag of this version, and files of it and of an earlier one."""
    for version, content in (("0.9", {"a": 0}), (qcomp.__version__, {"a": 1})):
        (tmp_path / version).mkdir()
        (tmp_path / version / "payloads.json").write_text(json.dumps(content))
    (tmp_path / "sign.json").write_text(json.dumps({"decoded": [1, {"file": "00"}], "refused": []}))
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "Release"), ("tag", CURRENT)):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_released_folder_is_not_recorded_anew(monkeypatch, released):
    assert releases.content("payloads", "0.9", released) == {"a": 0}
    assert json.loads(releases.newest("payloads", released).read_text()) == {"a": 1}
    with pytest.raises(ReleasedError, match="is released, and payloads would change; set the next version"):
        releases.to_write("payloads", released)
    monkeypatch.setattr(releases, "__version__", "99.0")
    assert releases.to_write("payloads", released) == released / "99.0" / "payloads.json"


def test_the_recorder_of_golden_files_asks_first(monkeypatch):
    before = releases.newest("payloads").read_bytes()
    monkeypatch.setattr(releases, "tags", lambda _: [CURRENT])
    monkeypatch.setattr(record_golden, "FILES", {"payloads": lambda: {}})
    with pytest.raises(ReleasedError):
        record_golden.main()
    assert releases.newest("payloads").read_bytes() == before


@pytest.mark.parametrize(
    ("new", "kept"),
    [
        ({"decoded": [1, {"file": "00"}, 2], "refused": [3], "accepted": []}, True),
        ({"decoded": [1, {"file": "01"}], "refused": []}, False),
        ({"decoded": [1], "refused": []}, False),
        ({"decoded": [1, {"file": "00"}]}, False),
    ],
)
def test_the_recorder_of_vectors_keeps_what_a_release_has(monkeypatch, released, new, kept):
    before = (released / "sign.json").read_text()
    monkeypatch.setattr(record_vectors, "FOLDER", released)
    monkeypatch.setattr(record_vectors, "FILES", ["sign"])
    monkeypatch.setattr(record_vectors, "record", lambda _: new)
    if kept:
        record_vectors.main()
        assert json.loads((released / "sign.json").read_text()) == new
    else:
        with pytest.raises(ReleasedError, match=r"sign.json would change entries of the release"):
            record_vectors.main()
        assert (released / "sign.json").read_text() == before
