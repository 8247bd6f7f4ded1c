"""The machine and the process: devices, memory, cores, ranks, storage, the cache folder, errors.

Imports nothing else of swiftgen.
"""
