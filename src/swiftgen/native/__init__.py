"""The CPU kernels: C++ sources, their build, their structs, and what calls them.

May import `system` alone.
"""
