"""Predict the classes of images in files, folders, tars and lists of names.

names          vit/inference/inputs.py     find the locations of encoded images
predictions    vit/inference/predict.py    decode them in worker processes, as in evaluation, and
                                           compute the most likely classes of each image
table, CSV     vit/inference/output.py     write results in the order of the inputs
"""
