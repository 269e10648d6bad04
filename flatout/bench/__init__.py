"""The bench: fixed workloads beside plain torch and the peers that are installed, and the guides' claims, measured."""
