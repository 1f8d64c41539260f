# Settings copied from
# open-mmlab/mmpretrain@ee7f2e88:configs/mae/benchmarks/vit-large-p16_8xb128-coslr-50e_in1k.py
# (Apache-2.0)
_base_ = ['../../_base_/datasets/imagenet_bs64_swin_224.py', '../../_base_/schedules/imagenet_bs1024_adamw_swin.py', '../../_base_/default_runtime.py']
train_pipeline = [dict(type='LoadImageFromFile'), dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'), dict(type='RandomFlip', prob=0.5, direction='horizontal'), dict(type='RandAugment', policies='timm_increasing', num_policies=2, total_level=10, magnitude_level=9, magnitude_std=0.5, hparams=dict(pad_val=[104, 116, 124], interpolation='bicubic')), dict(type='RandomErasing', erase_prob=0.25, mode='rand', min_area_ratio=0.02, max_area_ratio=0.3333333333333333, fill_color=[103.53, 116.28, 123.675], fill_std=[57.375, 57.12, 58.395]), dict(type='PackInputs')]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'), dict(type='CenterCrop', crop_size=224), dict(type='PackInputs')]
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=128, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
model = dict(type='ImageClassifier', backbone=dict(type='VisionTransformer', arch='large', img_size=224, patch_size=16, drop_path_rate=0.2, out_type='avg_featmap', final_norm=False, init_cfg=dict(type='Pretrained', checkpoint='', prefix='backbone.')), neck=None, head=dict(type='LinearClsHead', num_classes=1000, in_channels=1024, loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'), init_cfg=[dict(type='TruncNormal', layer='Linear', std=2e-05)]), train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.004, weight_decay=0.05, betas=(0.9, 0.999)), constructor='LearningRateDecayOptimWrapperConstructor', paramwise_cfg=dict(layer_decay_rate=0.75, custom_keys={'.ln': dict(decay_mult=0.0), '.bias': dict(decay_mult=0.0), '.cls_token': dict(decay_mult=0.0), '.pos_embed': dict(decay_mult=0.0)}))
param_scheduler = [dict(type='LinearLR', start_factor=0.0001, by_epoch=True, begin=0, end=5, convert_to_iter_based=True), dict(type='CosineAnnealingLR', T_max=45, by_epoch=True, begin=5, end=50, eta_min=1e-06, convert_to_iter_based=True)]
train_cfg = dict(by_epoch=True, max_epochs=50)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=3))
randomness = dict(seed=0, diff_rank_seed=True)
