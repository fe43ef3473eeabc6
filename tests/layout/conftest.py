"""What another process, with another hash seed, makes of the same trees and values."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tdbridge import layout_of
from tests import zoo

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, pathlib, pickle, sys
import jax, numpy, torch
from tdbridge import Layout, LayoutError, layout_of
from tdbridge.layout.constants import Constant
from tests import zoo
from tests.layout import values

loaded = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
here = {layout_of(build()): name for name, build in reversed(zoo.TREES.items())}
hostile = ["this:X", "antigravity:X", "xml.dom.minidom:Document", "numpy:testing.X",
           "numpy:f2py.X", "torch:onnx.X", "torch:_inductor.X", "jax:example_libraries.X"]
before = set(sys.modules)
for name in hostile:
    text = json.dumps({"version": 1, "leaves": [], "nodes": [[[], name, [], None, {}, []]]})
    try:
        raise AssertionError(Layout.from_json(text))
    except LayoutError:
        pass
imported = sorted(set(sys.modules) - before)
print(json.dumps({
    "imported": imported,
    "tokens": [Constant(value).token for value in values.UNSTABLE],
    "fingerprints": {name: layout.fingerprint for layout, name in here.items()},
    "found": {name: here.get(layout) for name, layout in loaded.items()},
}))
"""


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Digests and fingerprints from there, which pickled layouts are found in a dict there, and the
    modules that were loaded by reading hostile texts."""
    layouts = {name: layout_of(build()) for name, build in zoo.TREES.items()}
    assert len({hash(layout) for layout in layouts.values()}) == len(layouts)
    file = tmp_path_factory.mktemp("elsewhere") / "layouts"
    file.write_bytes(pickle.dumps(layouts))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(run.stdout)
