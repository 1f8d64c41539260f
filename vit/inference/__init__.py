"""Predict the classes of images in files, folders, tars and lists of names.

names          vit/inference/inputs.py     find the locations of encoded images
batches        vit/inference/batches.py    decode them in worker processes, as in evaluation
predictions    vit/inference/predict.py    compute the most likely classes of each image
table, CSV     vit/inference/output.py     write results in the order of the inputs
"""
