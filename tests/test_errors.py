"""What errors say."""

from __future__ import annotations

from flatout.errors import describe_error


def test_describe_error_is_one_short_line() -> None:
    assert describe_error(ValueError("\n  a\nb")) == "ValueError: a"
    assert describe_error(KeyError()) == "KeyError"
    assert len(describe_error(ValueError("x" * 1000))) == 212
