"""The tables of the docs, a file a topic; docs/make_tables.py writes them into the pages."""
