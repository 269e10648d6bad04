"""The state of runs, kept in files while they go on, and the local page that shows one."""
