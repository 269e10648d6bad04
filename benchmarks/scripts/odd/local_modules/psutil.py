"""Not the package."""

WHOSE = "the script's"
