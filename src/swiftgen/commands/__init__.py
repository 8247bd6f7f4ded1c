"""What the commands that write do: write, resume and verify, with prompts, signals and stdout.

May import `document`, `display` and everything below.
"""
