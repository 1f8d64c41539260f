"""Patch embeddings: a linear map, optionally between two norms (Dual PatchNorm)."""

from torch import Tensor, nn

from vit.layers.norm import create_norm


class PatchEmbed(nn.Module):
    """Splits images into patches and embeds each: (B, C, H, W) -> (B, h*w, D), row by row.

    Computes the products x_p E of equation 1.
    """

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int):
        super().__init__()
        # A convolution whose stride equals its kernel size is a linear map of each patch.
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        # Flatten row by row, as in `vit.layers.posemb` and timm's weights.
        return self.proj(images).flatten(2).transpose(1, 2)


class NormedPatchEmbed(nn.Module):
    """A `PatchEmbed` with a norm before and after the linear map.

    Dual PatchNorm (Kumar et al. 2023, arXiv 2302.01327;
    explainingai-code/VIT-Pytorch:model/patch_embed.py). The weight of `proj` has the shape of a
    convolution weight, as in a ViT without these norms.
    """

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int):
        super().__init__()
        height, width = patch_size
        self.patch_size = patch_size
        self.norm_input = create_norm("layernorm", in_chans * height * width)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = create_norm("layernorm", embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Embed normalized patches: (B, C, H, W) -> (B, h*w, D)."""
        height, width = self.patch_size
        # (B, C, H, W) -> (B, h, w, C, height, width)
        grid = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))
        patches = grid.permute(0, 2, 4, 1, 3, 5)
        normed = self.norm_input(patches.flatten(3)).view(patches.shape)
        # Call `proj` instead of multiplying by its weight, so that an adapter may replace it.
        x = self.proj(normed.permute(0, 3, 1, 4, 2, 5).reshape(images.shape))
        return self.norm(x.flatten(2).transpose(1, 2))
