"""The folder of a run: its files, its lock, and its copy at a URL."""
