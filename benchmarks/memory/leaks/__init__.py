"""Scripts with one planted leak each, and scripts that only look as if they had one."""
