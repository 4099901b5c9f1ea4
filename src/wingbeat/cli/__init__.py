"""One short file per command; main.py finds them. Nothing here is imported before its command is chosen."""
