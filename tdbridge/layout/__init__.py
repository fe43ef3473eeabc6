"""Where each leaf's bytes live: a tree becomes a Layout and one buffer."""

import tdbridge.layout.kinds  # noqa: F401 - makes the kinds known
from tdbridge.layout.buffer import consolidate as consolidate
from tdbridge.layout.plan import layout_of as layout_of
from tdbridge.layout.spec import Layout as Layout
from tdbridge.layout.spec import LeafSpec as LeafSpec
from tdbridge.layout.spec import NodeSpec as NodeSpec
from tdbridge.layout.spec import Segment as Segment

__all__ = ["Layout", "LeafSpec", "NodeSpec", "Segment", "consolidate", "layout_of"]
