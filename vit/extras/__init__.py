"""Optional features. Training works without each of these folders."""
