"""Layers from later papers. `vit.model` contains the layers of the original ViT."""
