"""What is measured of a run: speed, acceptance, Distinct-n, loops.

May import the events of `decoding` and `system`.
"""
