"""What people see of a run on stderr: the live panel, plain lines, and their words.

May import `figures` and everything below.
"""
