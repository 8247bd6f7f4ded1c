"""The one forward pass of the target: trees, KV caches, attention, layers, and the check that rows agree.

May import `models` and below; knows neither command line nor files of a run.
"""
