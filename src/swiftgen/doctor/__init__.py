"""`swiftgen doctor`: what this machine has, what a preset needs, and what to do about the rest.

May import `commands` and everything below; a stranger to `compare`.
"""
