"""Payloads: layout, round trip, damaged bytes, and golden files.

The golden file fixes the wire format of this version. `tests/golden/test_releases.py` reads those of earlier releases.
"""

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcomp
from qcomp import Key, Payload, PayloadError, PayloadSpec
from qcomp.core.payload import Field
from tests import releases
from tests.contract.compressors import COMPRESSORS

GOLDEN = releases.newest("payloads")
SPECS = [
    "sign:bucket_size=32,scale=l1",
    "sign:bucket_size=32,scale=rms",
    "qsgd:levels=1,bucket_size=32,norm=max",
    "qsgd:levels=7,bucket_size=32,norm=max",
    "qsgd:levels=7,bucket_size=32,norm=l2",
    "qsgd:levels=20,bucket_size=32,norm=max",
    "qsgd:levels=127,bucket_size=32,norm=max",
    "lloyd_max:bits=1,bucket_size=32,coding=fixed",
    "lloyd_max:bits=2,bucket_size=32,coding=fixed",
    "lloyd_max:bits=3,bucket_size=32,coding=fixed",
    "lloyd_max:bits=4,bucket_size=32,coding=fixed",
    "minmax:bucket_size=32",
    "identity",
    "cast:dtype=bfloat16",
    "cast:dtype=float16",
    "scaled(qsgd:levels=1,bucket_size=32,norm=max)",
    "topk:k=5,bucket_size=32",
    "topk:k=3,bucket_size=512",
    "topk:k=5,bucket_size=32,value_bits=4,coding=fixed",
    "randk:k=4,bucket_size=32",
    "randk:k=4,bucket_size=32,value_bits=3",
]
CODED = [
    "qsgd:levels=1,bucket_size=32,norm=l2,coding=elias",  # sparse
    "qsgd:levels=7,bucket_size=32,norm=max,coding=elias",  # dense
    "qsgd:levels=32767,bucket_size=32,norm=max,coding=elias",  # stored: coding would not shorten it
    "qsgd:levels=7,bucket_size=32,norm=l2,coding=range",
    "qsgd:levels=1000,bucket_size=32,norm=max,coding=range",
    "scaled(qsgd:levels=1,bucket_size=32,norm=max,coding=range)",
    "lloyd_max:bits=4,bucket_size=32,coding=range",
    "topk:k=1,bucket_size=32,value_bits=1",
    "topk:k=5,bucket_size=32,value_bits=2",
]
_KINDS = {type(qcomp.compressor(spec)) for spec in SPECS}
SPECS += {type(c): c.spec for c in reversed(COMPRESSORS) if type(c) not in _KINDS}.values()
"""And the first of each other class in the table of tests/contract."""
DTYPES = ("float32", "float64")
KEY = Key(seed=2**33 + 1, step=7, tensor=1, rank=2, hop=1, bucket=3)


def golden_input(dtype: str) -> np.ndarray:
    """Return 77 values from integer arithmetic; zeros of both signs and a subnormal are among them."""
    i = np.arange(77, dtype=np.int64)
    x = ((i * 7919 % 1009 - 504) * 2.0 ** (i % 11 - 9)).astype(dtype)
    x[[5, 40]] = 0.0, -0.0
    x[6] = 2.0**-140
    return x if dtype == "float32" else x + x / 3e7


def golden_record(spec: str, dtype: str) -> dict[str, str]:
    x, c = golden_input(dtype), qcomp.compressor(spec)
    payload = c.compress(x, key=KEY)
    return {"bytes": payload.to_bytes().hex(), "decoded": c.decompress(payload, like=x).tobytes().hex()}


def golden_records() -> dict[str, dict[str, str]]:
    """Return what the golden file has, for `tests.record_golden`."""
    return {f"{spec} {dtype}": golden_record(spec, dtype) for spec in [*SPECS, *CODED] for dtype in DTYPES}


class TestGolden:
    @pytest.mark.parametrize("spec", [*SPECS, *CODED])
    def test_float32(self, library, spec):
        self.check(library, spec, "float32")

    @pytest.mark.parametrize("spec", [*SPECS, *CODED])
    def test_float64(self, float64_library, spec):
        self.check(float64_library, spec, "float64")

    @staticmethod
    def check(library, spec, dtype):
        record = json.loads(GOLDEN.read_text())[f"{spec} {dtype}"]
        x, c = library.array(golden_input(dtype)), qcomp.compressor(spec)

        def compress(x):
            return c.compress(x, key=KEY).data

        def decompress(data):
            return c.decompress(Payload(spec, 77, dtype, data), like=x)

        if library.name == "jax" and not c.variable_length:
            # Without jit, JAX would compile every operation for every shape; a coder cannot be compiled.
            jax = pytest.importorskip("jax")
            compress, decompress = jax.jit(compress), jax.jit(decompress)
        assert Payload(spec, 77, dtype, compress(x)).to_bytes().hex() == record["bytes"]
        back = library.seal(Payload.from_bytes(bytes.fromhex(record["bytes"]), like=x))
        assert (back.compressor, back.size, back.dtype) == (spec, 77, dtype)
        decoded = library.numpy(decompress(back.data))
        assert decoded.dtype == dtype
        assert decoded.tobytes().hex() == record["decoded"]

    def test_the_golden_file_has_exactly_these_payloads(self):
        golden = json.loads(GOLDEN.read_text())
        assert golden.keys() == {f"{spec} {dtype}" for spec in [*SPECS, *CODED] for dtype in DTYPES}

    def test_the_golden_payloads_cover_every_kind_of_code(self):
        """The byte after the steps says whether they are coded; for Elias codes, the next says whether by gaps."""
        golden, ways = json.loads(GOLDEN.read_text()), []
        codes = [spec for spec in CODED if "coding" in spec]
        for spec in codes:
            data = read(bytes.fromhex(golden[f"{spec} float32"]["bytes"])).data.tolist()
            ways.append(data[qcomp.compressor(spec).payload_spec(77).shortest - 1 :][:2])
        elias = [way for way, spec in zip(ways, codes, strict=True) if "elias" in spec]
        assert [way[0] for way in ways] == [1, 1, 0, 1, 1, 1, 1]
        assert elias[:2] == [[1, 1], [1, 0]]


class TestLayout:
    def test_fields_are_aligned_and_padding_is_zero(self):
        spec = PayloadSpec(
            (
                Field("a", "uint8", 3),
                Field("b", "float32", 1),
                Field("c", "uint8", 1),
                Field("d", "float64", 1),
            )
        )
        assert spec.nbytes == 24
        parts = {
            "a": np.array([1, 2, 3], dtype=np.uint8),
            "b": np.array([1.0], dtype=np.float32),
            "c": np.array([4], dtype=np.uint8),
            "d": np.array([-2.0]),
        }
        expected = b"\1\2\3\0" + struct.pack("<f", 1.0) + b"\4" + bytes(7) + struct.pack("<d", -2.0)
        assert spec.join(parts).tobytes() == expected
        back = spec.split(np.frombuffer(expected, dtype=np.uint8))
        assert {name: part.tolist() for name, part in back.items()} == {
            "a": [1, 2, 3],
            "b": [1.0],
            "c": [4],
            "d": [-2.0],
        }

    def test_an_empty_field_takes_no_space(self):
        spec = PayloadSpec((Field("a", "uint8", 3), Field("b", "float32", 0)))
        assert spec.nbytes == 3
        assert PayloadSpec(()).nbytes == 0

    def test_a_layout_without_fields_cannot_be_joined(self):
        with pytest.raises(ValueError, match="no fields; expected at least one, which may have size 0"):
            PayloadSpec(()).join({})

    def test_a_buffer_of_another_size_is_an_error(self):
        with pytest.raises(PayloadError, match=r"has shape \(5,\); expected \(4,\)"):
            PayloadSpec((Field("b", "float32", 1),)).split(np.zeros(5, dtype=np.uint8))

    @pytest.mark.parametrize("spec", SPECS)
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_sizes_are_predicted_exactly(self, spec, dtype):
        c = qcomp.compressor(spec)
        for size in (0, 1, 7, 8, 9, 31, 32, 33, 77):
            payload = c.compress(golden_input(dtype)[:size], key=KEY)
            assert payload.nbytes == c.payload_spec(size, dtype).nbytes == len(payload.data)

    @pytest.mark.parametrize(
        ("spec", "size", "expected"),
        [
            ("sign:bucket_size=32", 77, 8 + 2 + 2 + 3 * 4),
            ("qsgd:levels=7,bucket_size=32", 77, 32 + 8 + 3 * 4),
            ("qsgd:levels=1,bucket_size=32", 77, 16 + 4 + 3 * 4),
            ("qsgd:levels=20,bucket_size=32", 77, (64 + 16) * 6 // 8 + 3 * 4),
            ("lloyd_max:bits=3,bucket_size=32", 77, (64 + 16) * 3 // 8 + 2 + 3 * 4),
            ("minmax:bucket_size=32", 77, 64 + 16 + 3 * 8),
            ("identity", 77, 77 * 4),
            ("cast", 77, 77 * 2),
            ("scaled(qsgd:levels=7,bucket_size=32)", 77, 32 + 8 + 3 * 4),
        ],
    )
    def test_sizes_by_hand(self, spec, size, expected):
        assert qcomp.compressor(spec).payload_spec(size).nbytes == expected


class TestRoundTrip:
    @pytest.mark.parametrize("size", [0, 1, 77])
    def test_bytes_and_back(self, library, size):
        x = library.array(golden_input("float32")[:size])
        c = qcomp.ScaledSign(bucket_size=32)
        payload = library.seal(c.compress(x))
        blob = payload.to_bytes()
        for form in (blob, bytearray(blob), memoryview(blob)):
            back = Payload.from_bytes(form, like=x)
            assert type(back.data) is type(payload.data)
            assert (back.compressor, back.size, back.dtype) == (payload.compressor, size, "float32")
            assert library.numpy(back.data).tolist() == library.numpy(payload.data).tolist()
            assert back.to_bytes() == blob

    def test_goes_from_any_library_to_any_other(self, libraries):
        blob = qcomp.MinMaxUInt8(32).compress(golden_input("float32")).to_bytes()
        for library in libraries.values():
            like = library.array([0.0], dtype=np.float32)
            assert Payload.from_bytes(blob, like=like).to_bytes() == blob

    def test_the_bytes_are_not_shared(self):
        blob = bytearray(qcomp.Identity().compress(np.ones(3)).to_bytes())
        back = Payload.from_bytes(blob, like=np.ones(1))
        blob[-1] ^= 1
        assert back.data.tolist() == np.ones(3).view(np.uint8).tolist()


def assemble(**changes) -> bytes:
    """Return a payload's bytes with a correct checksum, whatever else is wrong with them."""
    spec = changes.get("spec", b"sign:bucket_size=8,scale=l1")
    data = changes.get("data", bytes(8))
    header = struct.pack(
        "<4sBBHQQ",
        changes.get("magic", b"QCMP"),
        changes.get("version", 1),
        changes.get("dtype", 0),
        changes.get("spec_length", len(spec)),
        changes.get("size", 8),
        changes.get("data_length", len(data)),
    )
    return header + spec + struct.pack("<I", zlib.crc32(data, zlib.crc32(header + spec))) + data


def read(blob: bytes) -> Payload:
    return Payload.from_bytes(blob, like=np.zeros(1))


BLOB = qcomp.QSGD(levels=7, bucket_size=32).compress(golden_input("float32"), key=KEY).to_bytes()


class TestDamage:
    """Any bytes are a payload or raise PayloadError, and nothing else."""

    def test_the_helper_makes_valid_bytes(self):
        assert read(assemble()).size == 8

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"magic": b"XCMP"}, "starts with b'XCMP'"),
            ({"version": 2}, "has version 2; this release reads version 1"),
            ({"dtype": 2}, "dtype number 2"),
            ({"spec_length": 65535}, "header announces"),
            ({"spec_length": 3}, "header announces"),
            ({"data_length": 2**64 - 1}, "header announces"),
            ({"size": 2**64 - 1}, "has 8 bytes of data; sign:bucket_size=8,scale=l1 makes"),
            ({"size": 17}, "has 8 bytes of data"),
            ({"size": 0}, "has 8 bytes of data"),
            ({"spec": b"nothing"}, "no compressor 'nothing'"),
            ({"spec": b""}, "no compressor ''"),
            ({"spec": b"sign:bucket_size=9"}, "bucket_size is 9"),
            ({"spec": b"sign:scale=\xff"}, "cannot be made"),
            ({"spec": b"scaled(" * 5000}, "at most 1000"),
            ({"spec": b"scaled(" * 140 + b"sign" + b")" * 15}, "cannot be made"),
            ({"spec": b"scaled(" * 110 + b"qsgd" + b")" * 110}, "expected an unbiased compressor"),
            ({"spec": b"identity", "size": 2**62}, "has 8 bytes of data"),
            ({"spec": b"qsgd:levels=" + b"9" * 900}, "cannot be made"),
        ],
    )
    def test_contradictions_with_a_good_checksum(self, changes, message):
        with pytest.raises(PayloadError, match=message):
            read(assemble(**changes))

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(st.integers(0, len(BLOB) - 1))
    def test_truncated(self, length):
        with pytest.raises(PayloadError):
            read(BLOB[:length])

    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(st.binary(min_size=1, max_size=50))
    def test_extended(self, more):
        with pytest.raises(PayloadError):
            read(BLOB + more)
        with pytest.raises(PayloadError):
            read(more + BLOB)

    def test_every_flipped_bit(self):
        for bit in range(8 * len(BLOB)):
            damaged = bytearray(BLOB)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(PayloadError):
                read(bytes(damaged))

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(st.binary(max_size=200), st.booleans())
    def test_random_bytes(self, blob, with_magic):
        with pytest.raises(PayloadError):
            read(b"QCMP\1\0" + blob if with_magic else blob)

    @settings(derandomize=True, deadline=None, max_examples=300)
    @given(
        st.sampled_from([*SPECS, "sign", "x(y)", "scaled(", "scaled()", "qsgd:levels=", "\0", "(", ":"]).map(
            str.encode
        )
        | st.binary(max_size=30),
        st.sampled_from([0, 1, 8, 77, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
        st.integers(0, 255),
        st.binary(max_size=100),
    )
    def test_random_contents_with_a_good_checksum(self, spec, size, dtype, data):
        try:
            payload = read(assemble(spec=spec, size=size, dtype=dtype, data=data))
        except PayloadError:
            return
        # If it is accepted, it must be consistent and decodable.
        made = qcomp.compressor(payload.compressor)
        assert made.payload_spec(payload.size, payload.dtype).nbytes == len(data) == payload.nbytes

    def test_damaged_sizes_cause_no_big_allocation(self):
        absurd = [
            assemble(size=2**50),
            assemble(data_length=2**50),
            assemble(spec=b"identity", size=2**60, dtype=1),
            assemble(spec=b"scaled(" * 1000),
        ]
        for blob in absurd:
            with pytest.raises(PayloadError):
                read(blob)
        tracemalloc.start()
        try:
            for blob in absurd:
                with pytest.raises(PayloadError):
                    read(blob)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


class TestDecompress:
    def test_of_another_compressor(self):
        x = golden_input("float32")
        payload = qcomp.ScaledSign(bucket_size=32).compress(x)
        with pytest.raises(
            PayloadError,
            match="was made by sign:bucket_size=32,scale=l1; this compressor is sign:bucket_size=64",
        ):
            qcomp.ScaledSign(bucket_size=64).decompress(payload, like=x)

    def test_of_another_size(self):
        x = golden_input("float32")
        payload = qcomp.ScaledSign(bucket_size=32).compress(x)
        with pytest.raises(PayloadError, match="has 77 elements; like has 76"):
            qcomp.ScaledSign(bucket_size=32).decompress(payload, like=x[1:])

    @pytest.mark.parametrize("change", [-1, 1, 4])
    def test_with_data_of_another_length(self, change):
        x = golden_input("float32")
        c = qcomp.ScaledSign(bucket_size=32)
        payload = c.compress(x)
        data = np.zeros(payload.nbytes + change, dtype=np.uint8)
        with pytest.raises(PayloadError, match=r"has shape \(\d+,\); expected \(24,\)"):
            c.decompress(Payload(c.spec, 77, "float32", data), like=x)
