"""One tree in a directory that torch's DCP or Orbax opens with its own code."""

from tdbridge.checkpoint.api import detect as detect
from tdbridge.checkpoint.api import load as load
from tdbridge.checkpoint.api import save as save

__all__ = ["detect", "load", "save"]
