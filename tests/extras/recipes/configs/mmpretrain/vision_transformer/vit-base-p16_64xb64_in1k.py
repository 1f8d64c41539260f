# Settings copied from
# open-mmlab/mmpretrain@ee7f2e88:configs/vision_transformer/vit-base-p16_64xb64_in1k.py (Apache-2.0)
_base_ = ['../_base_/models/vit-base-p16.py', '../_base_/datasets/imagenet_bs64_pil_resize_autoaug.py', '../_base_/schedules/imagenet_bs4096_AdamW.py', '../_base_/default_runtime.py']
model = dict(head=dict(hidden_dim=3072), train_cfg=dict(augments=dict(type='Mixup', alpha=0.2)))
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
