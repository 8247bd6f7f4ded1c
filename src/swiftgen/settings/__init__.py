"""Presets: the schema, the plans to draft by, and the YAML files.

May import `system` alone.
"""
