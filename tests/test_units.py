import pytest

from flatout.errors import UsageError
from flatout.units import (
    counted,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_positive_seconds,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (3e-9, "3 ns"),
        (430e-6, "430 µs"),
        (0.00115, "1.15 ms"),
        (0.9996, "1 s"),
        (2.1, "2.1 s"),
        (59.96, "1 min"),
        (184, "3 min 4 s"),
        (3599.7, "1 h"),
        (7500, "2 h 5 min"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (8 * 1024**3, "8 GiB"), (149e9, "139 GiB")],
)
def test_capacities_are_binary(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_rates_are_decimal() -> None:
    assert format_rate(2.5e12, "FLOP/s") == "2.5 TFLOP/s"
    assert format_rate(30e9, "B/s") == "30 GB/s"
    assert format_rate(412_000, "launches/s") == "412 k launches/s"
    assert format_rate(5.03, "img/s") == "5.03 img/s"
    assert format_rate(999.7, "B/s") == "1 kB/s"


def test_sizes_and_durations_are_parsed() -> None:
    assert parse_bytes("8GiB") == parse_bytes("8 g") == 8 * 1024**3
    assert parse_bytes("8GB") == 8 * 10**9
    assert parse_bytes("17") == 17
    assert parse_seconds("10m") == parse_seconds("600") == parse_seconds("10 min") == 600
    assert parse_seconds("1.5h") == 5400
    assert parse_seconds("250ms") == 0.25


@pytest.mark.parametrize("text", ["", "GiB", "-3GiB", "3 parsecs", "1e400", "nan", "3GiB5", "9" * 400, "9" * 300 + "P"])
def test_nonsense_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError, match="write it as"):
        parse_bytes(text)
    with pytest.raises(UsageError, match="write it as"):
        parse_seconds(text)


def test_a_time_that_has_to_pass_is_above_zero() -> None:
    assert parse_positive_seconds("2m", "--patience") == 120.0
    with pytest.raises(UsageError, match="--patience is 0s; it is above 0; write it as 30s"):
        parse_positive_seconds("0s", "--patience")


def test_percentages() -> None:
    assert [parse_share(text) for text in ("3%", " 0.5 %", "0%", "150%")] == [0.03, 0.005, 0.0, 1.5]
    for text in ("3", "0.03", "-3%", "%", "nan%", "inf%", "3%%", "3% more"):
        with pytest.raises(UsageError, match=r"is not a percentage; write it as 3% or 0\.5%"):
            parse_share(text)


def test_nouns_follow_their_number() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
