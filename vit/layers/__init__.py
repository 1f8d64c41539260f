"""Parts of a network that the paper's ViT does not have; `vit.model` has what it has."""
