"""Import recipes of other projects, compare two recipes, and plot a recipe.

An import goes through these modules in one direction, and each step returns a value:

1. `importing` reads the recipe. `command` splits a command line into launcher, script and
   arguments, and `programs` detects the project. `python_config` evaluates a config file without
   running it. `arguments` parses the values by the project's table of all arguments.
2. `reading` maps each argument to this project's settings, and states whether the two agree. It
   follows the rule in the table, or calls a function of the project's module (`deit`, `timm_train`,
   `mae`, `torchvision_references`, `deit3_jax`, `big_vision`), which returns findings. `rates`
   compares the learning rates.
3. `summary` writes the YAML file and the summary of the mapping.

`difference` compares two configs, and `preview` plots a config.
"""
