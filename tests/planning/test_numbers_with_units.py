"""Numbers with units: parsing and formatting."""

import pytest

from qcomp.planning import numbers_with_units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("350M", 350_000_000),
        ("1.5B", 1_500_000_000),
        ("7b", 7 * 10**9),
        ("25_000", None),
        ("1000", 1000),
        ("1e6", 10**6),
    ],
)
def test_counts(text, value):
    if value is None:
        with pytest.raises(ValueError, match="expected a count such as 350M"):
            numbers_with_units.count(text)
    else:
        assert numbers_with_units.count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10gbit", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("100mbit", 12.5e6),
        ("100 Mbps", 12.5e6),
        ("100 MBps", 100e6),
        ("1.2GB/s", 1.2e9),
        ("125MB/s", 125e6),
        ("9600bit", 1200.0),
    ],
)
def test_bandwidths(text, value):
    assert numbers_with_units.bandwidth(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "10",
        "-1gbit",
        "10g",
        "10GB",
        "10 gbit/min",
        "10Gb/s",
        "10gb/S",
        "10GBPS",
        "nan",
        "infgbit",
    ],
)
def test_an_invalid_bandwidth_is_an_error(text):
    with pytest.raises(ValueError, match="expected a bandwidth such as 10gbit"):
        numbers_with_units.bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value"), [("25us", 25e-6), ("25µs", 25e-6), ("300ms", 0.3), ("1.5s", 1.5), ("80ns", 8e-8)]
)
def test_times(text, value):
    assert numbers_with_units.seconds(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["25", "25 min", "us"])
def test_an_invalid_time_is_an_error(text):
    with pytest.raises(ValueError, match="expected a time such as 25us"):
        numbers_with_units.seconds(text)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (numbers_with_units.count, "1e400"),
        (numbers_with_units.count, "1e300t"),
        (numbers_with_units.bandwidth, "1e400gbit"),
        (numbers_with_units.bandwidth, "1e300tbit"),
        (numbers_with_units.seconds, "1e400s"),
    ],
)
def test_numbers_too_large_for_a_float_are_errors(read, text):
    with pytest.raises(ValueError, match=f"'{text}' is too large; expected a "):
        read(text)


@pytest.mark.parametrize("exponent", range(-7, 4))
def test_shown_times_are_read_back(exponent):
    value = 1.23 * 10.0**exponent
    assert numbers_with_units.seconds(numbers_with_units.show_seconds(value)) == pytest.approx(
        value, rel=0.005
    )


@pytest.mark.parametrize("value", [12.5, 12.5e3, 99.9996e6, 1.25e9, 870e9 / 8])
def test_shown_bandwidths_are_read_back(value):
    assert numbers_with_units.bandwidth(numbers_with_units.show_bandwidth(value)) == pytest.approx(
        value, rel=0.005
    )
