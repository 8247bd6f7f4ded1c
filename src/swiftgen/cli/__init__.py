"""The command line: Typer commands with their options, and the one place where errors become two lines.

May import everything below; nothing imports it.
"""
