"""The documentation site: the repository's Markdown made into HTML that needs no network (``make site``)."""
