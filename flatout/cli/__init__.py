"""One file a verb, thin: read the arguments, call the room that does the work, print what it returned."""
