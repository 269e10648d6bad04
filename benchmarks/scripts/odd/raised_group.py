"""An exception group and a note."""

error = ValueError("one")
error.add_note("a note")
raise ExceptionGroup("several", [error, TypeError("two")])
