# Settings copied from open-mmlab/mmpretrain@ee7f2e88:configs/deit3/deit3-base-p16_64xb64_in1k.py
# (Apache-2.0)
_base_ = ['../_base_/models/deit3/deit3-base-p16-224.py', '../_base_/datasets/imagenet_bs64_deit3_224.py', '../_base_/schedules/imagenet_bs4096_AdamW.py', '../_base_/default_runtime.py']
train_dataloader = dict(batch_size=64)
optim_wrapper = dict(optimizer=dict(lr=1e-05, weight_decay=0.1))
auto_scale_lr = dict(base_batch_size=4096)
