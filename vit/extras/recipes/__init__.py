"""Import recipes of other programs, compare two recipes, and draw one.

A command line is split into launcher, script and arguments (`command`). A config file is evaluated
without running it (`python_config`). `importing` detects the program. The program's module (`deit`,
`timm_train`, `mae`, `torchvision_references`, `deit3_jax`, `mmpretrain`, `big_vision`) has a table
of all arguments with their defaults (`arguments`) and maps each argument to our settings in a
`reading`: same, differs, or no equivalent. `summary` writes the YAML and the account. `difference`
compares two configs, and `preview` draws one.
"""
