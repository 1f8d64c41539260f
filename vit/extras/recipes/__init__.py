"""Recipes of other programs, read as they mean them, and recipes compared and shown.

A command line is split into launcher, script and arguments (`command`), or a config file is
evaluated without running it (`python_config`). `importing` finds the program; its module (`deit`,
`timm_train`, `mae`, `torchvision_references`, `deit3_jax`, `mmpretrain`, `big_vision`) has a table
of all its arguments with their defaults (`arguments`) and says of each what it means here, in a
`reading`: the same, something else, or nothing that can be said here. `words` writes the YAML and
the account. `difference` compares two configs; `show` draws one.
"""
