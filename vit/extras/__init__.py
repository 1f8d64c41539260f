"""What a training can do without: each folder may be deleted, with its tests."""
