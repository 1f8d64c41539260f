"""The model sizes of the ViT papers, as arguments of `vit.model.VisionTransformer`."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "h": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "so400m": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362},
    "g": {"embed_dim": 1408, "depth": 40, "num_heads": 16, "mlp_ratio": 48 / 11},
    "G": {"embed_dim": 1664, "depth": 48, "num_heads": 16, "mlp_ratio": 64 / 13},
}
"""B, L, H: Table 1 of the ViT paper. Ti, S: Table 1 of DeiT (Touvron et al. 2021, arXiv
2012.12877). g, G: Table 2 of Zhai et al. 2022 (arXiv 2106.04560). SO400M: Alabdulmohsin et al. 2023
(arXiv 2305.13035)."""
SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}
"""Maps timm's size names to the names in `PRESETS`."""
