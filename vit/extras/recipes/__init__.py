"""Import recipes of other projects, compare two recipes, and plot a recipe.

`command` splits a command line into launcher, script and arguments. `python_config` evaluates a
config file without running it. `importing` detects the project. Each project's module (`deit`,
`timm_train`, `mae`, `torchvision_references`, `deit3_jax`, `big_vision`) has a table
of all arguments with their defaults and rules (`arguments`), and functions for arguments that need
more than a rule. A `reading` maps each argument to this project's settings by its rule or function,
and records whether the two agree. `summary` writes the YAML file and the summary of the mapping.
`difference` compares two configs, and `preview` plots a config.
"""
