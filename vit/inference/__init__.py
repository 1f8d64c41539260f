"""Classes of images that no data set contains: files, folders, tars, lists of names.

names             vit/inference/inputs.py     what is named becomes places of encoded images
  -> batches      vit/inference/batches.py    decoded by worker processes, as for evaluation
  -> predictions  vit/inference/predict.py    the likeliest classes of each image
  -> table, CSV   vit/inference/output.py     for people and for programs, in the inputs' order
"""
