"""Views of what was found: text, JSON, HTML. Nothing is computed here that is not shown."""
