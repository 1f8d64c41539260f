"""Audits of a run: repeat stretches of it, and compare them with its record bit for bit.

history.py     the content of a run folder: record, attempts, kept checkpoints, stretches
auditing.py    what this machine can claim, the stretches that are drawn, and their results
repeating.py   one stretch, trained again by the ordinary code in a temporary folder
judging.py     the differences between a repeated stretch and the record, or between two runs
self_test.py   the same step many times on every rank, without a run
"""
