"""What can only be measured on a GPU, in one command."""
