"""What `import flatout` and the command line share: tune, check and run, each a function that returns its result."""
