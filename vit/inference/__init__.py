"""Predict the classes of images from files, folders, tars and lists of names.

names             vit/inference/inputs.py     arguments become places of encoded images
  -> batches      vit/inference/batches.py    decoded by worker processes, as for evaluation
  -> predictions  vit/inference/predict.py    the likeliest classes of each image
  -> table, CSV   vit/inference/output.py     for users and for programs, in the inputs' order
"""
