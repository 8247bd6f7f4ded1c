"""Draft heads: their modules, and their files.

May import `forward` and everything below.
"""
