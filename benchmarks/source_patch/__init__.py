"""Are patched scripts as fast as `flatout run`, with the same losses?"""
