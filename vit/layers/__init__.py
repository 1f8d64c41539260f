"""Parts of a network that later recipes add; `vit.model` has the parts of the paper's ViT."""
