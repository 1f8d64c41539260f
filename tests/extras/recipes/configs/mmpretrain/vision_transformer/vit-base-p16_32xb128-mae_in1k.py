# Settings copied from
# open-mmlab/mmpretrain@ee7f2e88:configs/vision_transformer/vit-base-p16_32xb128-mae_in1k.py
# (Apache-2.0)
_base_ = ['../_base_/datasets/imagenet_bs64_swin_224.py', '../_base_/schedules/imagenet_bs1024_adamw_swin.py', '../_base_/default_runtime.py']
model = dict(type='ImageClassifier', backbone=dict(type='VisionTransformer', arch='base', img_size=224, patch_size=16, drop_path_rate=0.1), neck=None, head=dict(type='VisionTransformerClsHead', num_classes=1000, in_channels=768, loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')), init_cfg=[dict(type='TruncNormal', layer='Linear', std=0.02), dict(type='Constant', layer='LayerNorm', val=1.0, bias=0.0)], train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.0001 * 4096 / 256, weight_decay=0.3, eps=1e-08, betas=(0.9, 0.95)), paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys={'.cls_token': dict(decay_mult=0.0), '.pos_embed': dict(decay_mult=0.0)}))
custom_hooks = [dict(type='EMAHook', momentum=0.0001)]
auto_scale_lr = dict(base_batch_size=4096)
