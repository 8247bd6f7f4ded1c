"""A document on disk: the text, the token log, run.yaml, and who may write them.

May import `figures` and everything below; a stranger to `training`.
"""
