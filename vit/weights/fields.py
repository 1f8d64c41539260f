"""Decide whether each field of another program's config is read, refused or only named in a note.

A field is either listed in the table for its file, or unknown:

    read        the reader uses the field
    unused      the field does not change predictions
    accepted    any other value would change predictions and is an error
    unknown     a note names the field; a step of preprocessing (`do_...`) must be off

Sources: huggingface/transformers:src/transformers/models/vit/configuration_vit.py and
image_processing_backends.py; huggingface/pytorch-image-models:timm/models/_pretrained.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit.system.files import WeightsError
from vit.system.spelling import few

_OFF = (False, None)


def _table(
    read: str, unused: str, accepted: dict[str, tuple[Any, ...]]
) -> dict[str, str | tuple[Any, ...]]:
    """Return the rule of each field: "read", "unused", or the accepted values."""
    return {
        **dict.fromkeys(read.split(), "read"),
        **dict.fromkeys(unused.split(), "unused"),
        **accepted,
    }


VIT_CONFIG = _table(
    read="model_type architectures hidden_size num_hidden_layers num_attention_heads"
    " intermediate_size image_size patch_size num_channels qkv_bias layer_norm_eps id2label"
    " problem_type",
    unused="label2id num_labels initializer_range hidden_dropout_prob attention_probs_dropout_prob"
    " dtype torch_dtype transformers_version encoder_stride pooler_act pooler_output_size"
    " decoder_hidden_size decoder_intermediate_size decoder_num_attention_heads"
    " decoder_num_hidden_layers mask_ratio norm_pix_loss output_attentions output_hidden_states"
    " return_dict use_cache finetuning_task gradient_checkpointing chunk_size_feed_forward"
    " attn_implementation",
    accepted={
        "hidden_act": ("gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_new"),
        "pruned_heads": (None, {}),
        "quantization_config": (None,),
    },
)
"""The fields in `config.json` of transformers' ViT and ViT-MAE."""

IMAGE_PROCESSOR = _table(
    read="image_processor_type feature_extractor_type size crop_size default_to_square"
    " do_center_crop do_rescale rescale_factor do_normalize image_mean image_std apply_exif",
    unused="do_convert_rgb do_reduce_labels processor_class data_format input_data_format"
    " return_tensors device disable_grouping transformers_version",
    accepted={
        "do_resize": (True,),
        "resample": (2, 3),
        "crop_pct": (None,),
        "offset": _OFF,
        "rescale_offset": _OFF,
        "use_square_size": _OFF,
    },
)
"""The fields in transformers' `preprocessor_config.json`. Images are always converted to RGB."""

TIMM_CONFIG = _table(
    read="architecture num_classes global_pool model_args pretrained_cfg label_names tag input_size"
    " interpolation crop_pct crop_mode mean std classifier apply_exif",
    unused="labels num_features label_descriptions custom_load fixed_input_size min_input_size"
    " pool_size test_pool_size first_conv license description origin_url paper_name paper_ids"
    " notes url file hf_hub_id hf_hub_filename source",
    accepted={"label_offset": (None, 0)},
)
"""The fields in timm's `config.json` and its `pretrained_cfg`."""


TIMM_OPTIONS = ("mean", "std", "crop_pct", "interpolation", "crop_mode", "model_kwargs")
"""The options of timm's command line that describe a model and its preprocessing."""
PROGRAM_OPTIONS = ("input_size", "val_crop_size", "val_resize_size")
"""The options of MAE's and torchvision's command lines that describe preprocessing."""


def check_fields(
    content: Mapping[str, Any], table: Mapping[str, str | tuple[Any, ...]], path: Path
) -> list[str]:
    """Return a note with the fields of `path` that are not in `table`.

    Raises WeightsError for all fields whose values would change predictions.
    """
    rules = {name: table.get(name, _OFF if name.startswith("do_") else None) for name in content}
    refused = [
        f"{name} is {content[name]!r}, expected {' or '.join(map(repr, rule))}"
        for name, rule in rules.items()
        if isinstance(rule, tuple) and content[name] not in rule
    ]
    if refused:
        raise WeightsError(
            f"{path}: {'; '.join(refused)}: this project would compute something else, so use the"
            " model in its own program"
        )

    unknown = [name for name, rule in rules.items() if rule is None and not name.startswith("_")]
    return [f"{path.name}: unknown fields are not used: {few(unknown)}"] if unknown else []
