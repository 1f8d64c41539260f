# Settings copied from
# open-mmlab/mmpretrain@ee7f2e88:configs/_base_/schedules/imagenet_bs4096_AdamW.py (Apache-2.0)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.003, weight_decay=0.3), paramwise_cfg=dict(custom_keys={'.cls_token': dict(decay_mult=0.0), '.pos_embed': dict(decay_mult=0.0)}))
param_scheduler = [dict(type='LinearLR', start_factor=0.0001, by_epoch=True, begin=0, end=30, convert_to_iter_based=True), dict(type='CosineAnnealingLR', T_max=270, by_epoch=True, begin=30, end=300)]
train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=4096)
