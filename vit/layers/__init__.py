"""Layers for additions of later papers. `vit.model` contains the layers of the original ViT."""
