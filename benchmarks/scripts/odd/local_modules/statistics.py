"""Not the standard library's."""

WHOSE = "the script's"
