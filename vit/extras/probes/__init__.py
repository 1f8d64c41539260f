"""Measure the features of a trained model with k-NN and a linear probe (`launch/eval.py --knn`)."""
