"""The version of swiftgen."""

__version__ = "0.1.0"
