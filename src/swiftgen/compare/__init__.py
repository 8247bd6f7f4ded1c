"""`swiftgen compare`: ways to write side by side, in turns, and the report of their speed and text.

May import `commands` and everything below; a stranger to `doctor`.
"""
