"""Where the time of a few training steps went: by operator, module, line and part, against the machine's ceilings."""
