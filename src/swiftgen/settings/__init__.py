"""Presets: the schema, and the YAML files.

May import `system` alone.
"""
