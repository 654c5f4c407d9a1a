"""The test vectors of docs/format.md: qcomp writes and reads them, and so do readers that know only that page."""

import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from functools import cache

import numpy as np
import pytest

import qcomp
from qcomp.core.coding.bits import BitWriter
from qcomp.core.mean.framing import unseal
from qcomp.core.registry import find_class
from tests import record_vectors
from tests.contract.compressors import COMPRESSORS
from tests.docs.pages import DOCS, ROOT
from tests.record_vectors import FILES, FOLDER, KEY, SPECS, array, frame_of, native

EXAMPLES = ROOT / "examples"
READER = [EXAMPLES / f"{name}.py" for name in ("read_payload", "payload_bits", "payload_specs")]
C_READER = FOLDER / "reader.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
OF_PAYLOADS = [*SPECS, "files", "specs"]
FIXED = [
    file
    for file in SPECS
    if not file.endswith(("elias", "range", "gaps")) and file not in {"scaled", "whole_fields"}
]
"""What the reader in C reads."""


@cache
def content(file):
    return json.loads((FOLDER / f"{file}.json").read_text())


@pytest.fixture(scope="module")
def reader():
    """Return the independent reader, which needs neither qcomp nor NumPy."""
    sys.path.insert(0, str(EXAMPLES))
    import read_payload

    yield read_payload
    sys.path.remove(str(EXAMPLES))


def bits(text):
    digits, _, times = text.partition("*")
    return bytes.fromhex(digits) * int(times or 1)


def require_vector(found):
    """Raise AssertionError unless qcomp makes the file of a vector, and decodes it to its bits."""
    x = array(found["input"], found["dtype"])
    c = qcomp.compressor(found["compressor"])
    assert c.compress(x, key=KEY).to_bytes().hex() == found["file"]
    require_decoded(found)


def require_decoded(found):
    for dtype, expected in found["decoded"].items():
        assert values_of(bytes.fromhex(found["file"]), dtype).tobytes() == bits(expected), dtype


def values_of(file, dtype="float64"):
    """Return what qcomp reads in a file."""
    payload = qcomp.Payload.from_bytes(file, like=np.zeros(0))
    like = np.zeros(payload.size, dtype=native(dtype))
    return qcomp.compressor(payload.compressor).decompress(payload, like=like)


@pytest.mark.parametrize("file", FILES)
def test_the_recorder_writes_these_files(file):
    pytest.importorskip("ml_dtypes")
    assert record_vectors.text_of(record_vectors.record(file)) == (FOLDER / f"{file}.json").read_text()


@pytest.mark.parametrize("file", SPECS)
def test_qcomp_decodes_each_file(file):
    pytest.importorskip("ml_dtypes")
    assert {found["compressor"] for found in content(file)["decoded"]} >= set(SPECS[file])
    for found in content(file)["decoded"]:
        require_decoded(found)


@pytest.mark.parametrize("file", ["sign", "qsgd_range", "topk_gaps"])
@pytest.mark.parametrize("part", ["input", "file", "decoded"])
def test_a_changed_vector_is_noticed(file, part, reader):
    """Whichever digit of a file or of decoded bits is another one, or the sign of the largest element."""
    found = content(file)["decoded"][3]
    text = found[part]["float32"] if part == "decoded" else found[part]
    largest = 8 * int(np.abs(array(found["input"], "float32")).argmax()) + 6
    for place in [largest] if part == "input" else range(0, len(text), 23):
        digit = f"{int(text[place], 16) ^ 8:x}"
        other = text[:place] + digit + text[place + 1 :]
        changed = {**found, part: {"float32": other} if part == "decoded" else other}
        with pytest.raises((AssertionError, qcomp.PayloadError)):
            require_vector(changed)
        if part != "input":
            with pytest.raises((AssertionError, reader.RefusedError)):
                require_read(reader, changed)


def require_read(reader, found):
    """Raise AssertionError unless the independent reader decodes a file to the bits of a vector."""
    for dtype, expected in found["decoded"].items():
        _, _, values = reader.read(bytes.fromhex(found["file"]), dtype)
        assert reader.written(values, dtype) == bits(expected), (found, dtype)


@pytest.mark.parametrize("file", SPECS)
def test_the_reader_decodes_each_file(file, reader):
    for found in content(file)["decoded"]:
        require_read(reader, found)


@pytest.mark.parametrize("file", OF_PAYLOADS)
def test_what_must_be_refused_is_refused_by_qcomp_and_the_reader(file, reader):
    refused = content(file)["refused"]
    assert len(refused) >= 2
    for found in refused:
        data = bytes.fromhex(found["file"])
        with pytest.raises(qcomp.PayloadError):
            qcomp.Payload.from_bytes(data, like=np.zeros(0)) if file in {"files", "specs"} else values_of(
                data
            )
        with pytest.raises(reader.RefusedError):
            pytest.fail(f"{found['case']}: {reader.read(data)}")


def test_nested_whole_fields_with_2_to_the_64_elements_are_refused(reader):
    """The file passes the check of its number of elements; it has 4 MiB, too much for the JSON files."""
    spec, bucket = "qsgd:levels=1,bucket_size=1048576", 1 << 20
    while bucket > 2:
        bucket = bucket // 2 + 1
        spec = f"whole_fields({spec}):field={bucket}"
    n, size = 2**45, 2**22
    assert n == 2**23 * size
    assert n // bucket << 20 == 2**64
    file = record_vectors.blob(spec, n, bytes(size))
    with pytest.raises(qcomp.PayloadError):
        qcomp.Payload.from_bytes(file, like=np.zeros(0))
    with pytest.raises(reader.RefusedError):
        reader.read(file)


def test_other_spec_strings_are_read(reader):
    for found in content("specs")["accepted"]:
        payload = qcomp.Payload.from_bytes(bytes.fromhex(found["file"]), like=np.zeros(0))
        assert (
            payload.compressor
            == found["written by qcomp"]
            == reader.parsed(reader.read(bytes.fromhex(found["file"]))[0]).spec
        )
        require_decoded(found)
        require_read(reader, found)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_what_qcomp_does_not_write_is_read(reader):
    pytest.importorskip("ml_dtypes")
    for found in content("unusual")["accepted"]:
        require_decoded(found)
        require_read(reader, found)


def with_checksum(file):
    start = 24 + int.from_bytes(file[6:8], "little")
    checksum = zlib.crc32(file[start + 4 :], zlib.crc32(file[:start]))
    return file[:start] + checksum.to_bytes(4, "little") + file[start + 4 :]


@pytest.mark.parametrize("file", ["qsgd_elias", "qsgd_range", "lloyd_max_range", "topk_gaps"])
def test_the_reader_refuses_damaged_codes_where_qcomp_does(file, reader):
    """Every bit of a coded payload, with a good checksum."""
    *_, found = [v for v in content(file)["decoded"] if v["case"] == "three buckets, the last padded"]
    good, outcomes = bytes.fromhex(found["file"]), set()
    start = 28 + int.from_bytes(good[6:8], "little")
    for bit in range(8 * start, 8 * len(good), 5):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        damaged = with_checksum(bytes(damaged))
        try:
            expected = values_of(damaged)
        except qcomp.PayloadError:
            expected = None
        try:
            found = np.array(reader.read(damaged, "float64")[2])
        except reader.RefusedError:
            found = None
        assert (found is None) == (expected is None), bit
        assert found is None or np.array_equal(found, expected, equal_nan=True), bit
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_the_reader_draws_and_codes_alike(reader):
    for each in content("draws")["philox"]:
        assert reader.philox(each["counter"], each["key"]) == each["words"]
    for each in content("draws")["keys"]:
        key, stream = each["key"], each["stream"]
        high, low = (
            (key[name] >> 32 for name in ("step", "seed")),
            (key[name] & 2**32 - 1 for name in ("step", "seed")),
        )
        (step1, seed1), (step0, seed0) = high, low
        words = reader.philox([step0, step1, key["tensor"], key["rank"]], [seed0, seed1])[:2]
        assert [*words, key["hop"], key["bucket"]] == stream
        assert reader.draws(stream, 2, 64, 8) == each["draws of bucket 2, of 5 elements, bucket_size 64"]
    for code in ("gamma", "omega"):
        for number, word in content("codewords")[code].items():
            writer = BitWriter()
            writer.put(int(word, 2), len(word))
            source = reader.Source(writer.finish())
            assert getattr(source, code)() == int(number)
            assert source.at == len(word)
    for code, word in (("gamma", "0" * 64 + "1" * 65), ("omega", "101101000000" + "1" * 65)):
        source = reader.Source(int(word, 2).to_bytes(-(-len(word) // 8), "big"))
        source.bits(-len(word) % 8)
        with pytest.raises(reader.RefusedError, match="more than 64 bits"):
            getattr(source, code)()


def test_messages_consist_of_their_payloads():
    for each in content("messages")["frames"]:
        frame = frame_of(each["compressors"], with_lengths=each["lengths"])
        message = np.frombuffer(bytes.fromhex(each["message"]), dtype=np.uint8)
        opened = frame.open(message)
        assert [x.data.tobytes().hex() for x in opened.payloads] == each["payloads"]
        assert opened.verdict.tolist() == [each["verdict"]]
        sealed = np.frombuffer(bytes.fromhex(each["sealed for 3 ranks"]), dtype=np.uint8)
        inside, blamed = unseal(sealed, 3)
        assert (inside.tobytes(), sorted(blamed)) == (message.tobytes(), each["blamed"])
        assert each["blamed"] == [2] * each["verdict"]
        table = b"".join(n.to_bytes(8, "little") for n in [len(p) // 2 for p in each["payloads"]] + [1])
        parts = [
            table if each["lengths"] else b"",
            *map(bytes.fromhex, each["payloads"]),
            bytes([each["verdict"]]),
        ]
        assert b"".join(part + bytes(-len(part) % 8) for part in parts) == message.tobytes()


def longest_gaps(k, size, bits, n):
    """Return the greatest length of gaps, by the formula of the page."""
    total = 0
    for c in [size] * (n // size) + [n % size] * (n % size > 0):
        most = min(k, c)
        divisors = {q: max(1, (11 * c + 8 * q) // (16 * q)) for q in range(1, most + 1)}
        elements = max((c - q) // d + q * (1 + (d - 1).bit_length() + bits) for q, d in divisors.items())
        total += 1 + (most - 1).bit_length() + (22 if bits == 1 else 46) + elements
    return -(-total // 8)


def test_bounds_are_those_of_the_page():
    found = content("messages")["bounds"]
    of_gaps = [each for each in found if each["compressor"].startswith("topk")]
    assert len(of_gaps) >= 4
    for each in of_gaps:
        numbers = map(int, re.findall(r"\d+", each["compressor"]))
        assert (each["shortest"], each["longest"]) == (0, longest_gaps(*numbers, each["elements"]))
    coded = [each for each in found if "coding" in each["compressor"]]
    assert {each["elements"] > 0 for each in coded} == {True, False}
    for each in coded:
        assert each["shortest"] == 4 * -(-each["elements"] // 16) + 1


def halved(row):
    """Return the sum of a list of NumPy's scalars, in the order of the page."""
    row = row + [row[0] * 0] * ((1 << (len(row) - 1).bit_length()) - len(row))
    while len(row) > 1:
        half = len(row) // 2
        row = [a + b for a, b in zip(row[:half], row[half:], strict=True)]
    return row[0]


def square(x):
    """Return a square whose last bit is cleared."""
    word = np.dtype(f"u{x.nbytes}").type
    return ((x * x).view(word) & ~word(1)).view(x.dtype)


def test_sums_and_steps_are_those_of_the_page():
    for each in content("sums")["rows"]:
        row = list(array(each["row"], each["dtype"]))
        number = type(row[0])
        largest = max(map(abs, row))
        p = number(2.0 ** (math.frexp(largest)[1] - 1)) if largest else number(1)
        parts = [x if x >= 2.0**-63 else x * 0 for x in (abs(x) / p for x in row)]
        squares = halved(list(map(square, parts)))
        expected = {
            "sum": halved(row),
            "mean magnitude": halved(list(map(abs, row))) / number(len(row)),
            "root mean square": np.sqrt(squares / number(len(row))) * p,
            "norm": np.sqrt(squares) * p,
        }
        for name, value in expected.items():
            assert value.tobytes().hex() == each[name], name
    for each in content("sums")["rounded up"]:
        (norm,) = array(each["norm"], each["dtype"])
        quotient, low = norm / type(norm)(each["over"]), (1 << 24 - each["bits"]) - 1
        word = int(np.float32(quotient).view(np.uint32)) + low & ~low
        if np.uint32(word).view(np.float32) < quotient:
            word += low + 1
        step = max(np.uint32(word).view(np.float32), np.float32(2.0**-126)) if norm else np.float32(0)
        assert step.tobytes().hex() == each["step"], each


def test_the_reader_is_a_command_that_needs_no_package(tmp_path):
    good, bad = content("qsgd")["decoded"][3], content("qsgd")["refused"][0]
    for found, status in ((good, 0), (bad, 1)):
        (tmp_path / "payload").write_bytes(bytes.fromhex(found["file"]))
        command = [sys.executable, "-E", "-s", "-S", READER[0], tmp_path / "payload"]  # without site-packages
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        if found is good:
            assert done.stdout.startswith(f"{good['compressor']}: 37 elements of float32\n")


def test_readers_and_vectors_are_small():
    for file in READER:
        assert len(file.read_text().splitlines()) <= 200
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert {name: size for name, size in sizes.items() if size > 45_000} == {}
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FILES)


def test_the_page_has_every_compressor_with_its_defaults():
    page = (DOCS / "format.md").read_text()
    own = [name for name in qcomp.compressor_names() if find_class(name).__module__.startswith("qcomp.")]
    covered = {
        name for specs in SPECS.values() for spec in specs for name in re.findall(r"[a-z_]+(?=[:(]|$)", spec)
    }
    assert covered >= set(own)
    for name in own:
        assert f"### {name}\n" in page
        spec = qcomp.compressor(name if name not in {"scaled", "whole_fields"} else f"{name}(identity)").spec
        for field, default in re.findall(r"(\w+)=(\w+)", spec):
            assert re.search(rf"\| `{field}` \| `?{default}`? \|", page), (name, field)


def test_the_page_and_the_reader_know_which_compressors_may_be_inside_of_others(reader):
    promises = {"keeps zeros": set(), "unbiased": set()}
    for c in [*COMPRESSORS, *(qcomp.compressor(spec) for specs in SPECS.values() for spec in specs)]:
        kept = {
            "keeps zeros": c.traits.keeps_zero and not c.variable_length,
            "unbiased": c.traits.unbiased,
        }
        found = reader.parsed(c.spec)
        in_reader = {"keeps zeros": found.keeps_zero, "unbiased": found.unbiased}
        assert in_reader == kept, f"{c.spec} in examples/payload_specs.py"
        for promise in promises:
            promises[promise] |= {c.name} if kept[promise] else set()
    page = (DOCS / "format.md").read_text()
    for promise, names in promises.items():
        (row,) = re.findall(rf"^\| `.* \*{promise}\*(.*) \|$", page, re.MULTILINE)
        assert names == {*re.findall("`([a-z_]+)`", row)} & {*qcomp.compressor_names()}, promise


def is_fixed(file):
    return not qcomp.compressor(qcomp.Payload.from_bytes(file, like=np.zeros(0)).compressor).variable_length


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_the_reader_in_c_reads_each_payload_of_fixed_length(tmp_path):
    program = tmp_path / "reader"
    command = [COMPILER, "-std=c99", "-ffp-contract=off", C_READER, "-o", program, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines, expected = [], []
    of_unusual = [found for found in content("unusual")["accepted"] if is_fixed(bytes.fromhex(found["file"]))]
    assert len(of_unusual) >= 8
    for found in [*(each for file in FIXED for each in content(file)["decoded"]), *of_unusual]:
        for dtype in {"float32", "float64"} & found["decoded"].keys():
            lines.append(f"{found['file']} {dtype}\n")
            expected.append(bits(found["decoded"][dtype]).hex())
    for file in [*FIXED, "files"]:
        lines += [f"{found['file']} float32\n" for found in content(file)["refused"]]
        expected += ["refused"] * len(content(file)["refused"])
    done = subprocess.run(
        [program], input="".join(lines), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == expected
