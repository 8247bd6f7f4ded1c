"""From token ids to text: a stream of whole characters, and which tokens an alphabet leaves out.

May import `system` alone.
"""
