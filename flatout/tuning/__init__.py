"""Search for what helps a script here: trial processes, interleaved windows, proof, break-even."""
