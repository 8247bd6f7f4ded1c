"""Comparing ways to write the same document: contenders, measurement, results, report."""
