"""The rules about imports: folders in order, nothing heavy at import, private names in _compat."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "tdbridge").rglob("*.py"))
}

# The order in which data moves. Folders of one row stand beside each other.
ORDER = [
    {"errors"},
    {"_compat"},
    {"layout"},
    {"pytrees"},
    {"convert"},
    {"distributed"},
    {"cast"},
    {"loaders", "collectives", "checkpoint", "sending"},
    {"cli"},
]
RANK = {folder: rank for rank, row in enumerate(ORDER) for folder in row}
HEAVY = {"orbax", "grain", "torchdata", "ray", "tensorstore", "sklearn"}
GUARDED = {"torch", "jax", "jaxlib", "tensordict", "optree"}


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str, str]]:
    """Give (line, bound name, dotted name) of each import, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield node.lineno, bound, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                package = parents[: len(parents) - node.level + 1]
                base = ".".join([*package, *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{base}.{alias.name}"


# --- folders


def misplaced_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Say which imports of a module do not point to its own folder or to one above it."""
    if module == "tdbridge":
        return []  # the public names come from everywhere
    folder = module.split(".")[1]
    if folder not in RANK:
        return [f"{folder!r} has no place yet in the order of folders: give it one in {__file__}"]
    found = []
    for line, _, name in imports(ast.parse(source), module, is_package):
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if root != "tdbridge" or target == folder:
            continue
        if target not in RANK:
            found.append(f"{module}:{line} imports {name}: import from the folder that defines it")
        elif RANK[target] >= RANK[folder]:
            found.append(f"{module}:{line} imports {name}: {target} does not stand above {folder}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_own_folder_and_those_above(module: str):
    path = MODULES[module]
    assert misplaced_imports(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("layout.plan", "from tdbridge.convert import to_jax", "convert does not stand above"),
        ("layout.plan", "import tdbridge.pytrees.static", "pytrees does not stand above layout"),
        ("layout.plan", "from ..convert.dlpack import export", "convert does not stand above"),
        ("layout.plan", "def f():\n    from tdbridge.cli import app", "plan:2 imports"),
        ("layout.plan", "from tdbridge import Layout", "import from the folder that defines it"),
        ("layout.plan", "import tdbridge", "import from the folder that defines it"),
        ("errors", "from tdbridge.layout import spec", "layout does not stand above errors"),
        ("checkpoint.dcp", "from tdbridge.loaders import rows", "loaders does not stand above"),
        ("cast.policy", "from tdbridge import collectives", "collectives does not stand above"),
        ("sparse.coo", "", "'sparse' has no place yet in the order of folders"),
    ],
)
def test_a_misplaced_import_is_found(module: str, source: str, complaint: str):
    (found,) = misplaced_imports(source, f"tdbridge.{module}")
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout.plan", "from tdbridge.layout.spec import Layout"),
        ("layout.plan", "from . import spec\nfrom .spec import Layout"),
        ("layout.plan", "from tdbridge import errors\nfrom tdbridge.errors import LayoutError"),
        ("convert.to_jax", "from ..pytrees.arraydict import ArrayDict\nimport jax, torch"),
        ("cli", "from tdbridge import cast, checkpoint, convert, loaders"),
    ],
)
def test_a_well_placed_import_is_not_found(module: str, source: str):
    assert misplaced_imports(source, f"tdbridge.{module}") == []


# --- what an import loads


def loaded_by(statement: str) -> set[str]:
    """Name the heavy packages that a fresh interpreter has loaded after the statement."""
    probe = f"import sys; {statement}; print(*{HEAVY} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", probe], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_import_loads_nothing_heavy():
    assert loaded_by("import tdbridge") == set()


def test_the_loaders_load_nothing_heavy():
    assert loaded_by("import tdbridge.loaders") == set()


def test_the_probe_sees_what_is_loaded():
    assert loaded_by("import tdbridge, tensorstore") == {"tensorstore"}


# --- private names of others


def is_private(name: str) -> bool:
    return any(
        part.startswith("_") and not (part.startswith("__") and part.endswith("__"))
        for part in name.split(".")
    )


def dotted(node: ast.AST) -> str | None:
    """Spell `a.b.c` out; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def private_uses(source: str) -> list[str]:
    """Say where a module touches an underscore name of a guarded project.

    Seen are imports, and attributes of what was imported, `getattr` with a constant included. What
    hides behind a variable (``leaf._data``) is not.
    """
    tree = ast.parse(source)
    guarded = {}  # bound name -> what it is a name of
    found = set()
    for line, bound, name in imports(tree, "", False):
        if name.partition(".")[0] in GUARDED:
            guarded[bound] = name if bound != name.partition(".")[0] else bound
            if is_private(name):
                found.add((line, name))
    for node in ast.walk(tree):
        name = dotted(node)
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                args=[owner, ast.Constant(value=str(attribute)), *_],
            ) if dotted(owner):
                name = f"{dotted(owner)}.{attribute}"
        root, _, rest = (name or "").partition(".")
        if root in guarded and is_private(rest):
            found.add((node.lineno, f"{guarded[root]}.{rest}"))  # pyright: ignore[reportAttributeAccessIssue]
    # `torch._C` inside `torch._C._x` is one use, not two.
    longest = [
        (line, name)
        for line, name in found
        if not any(line == other and longer.startswith(f"{name}.") for other, longer in found)
    ]
    return [f"line {line}: {name}" for line, name in sorted(longest)]


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("tdbridge._compat")])
def test_private_names_of_others_are_used_in_compat_alone(module: str):
    assert private_uses(MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import torch\ntorch._foreach_copy_(a, b)", "line 2: torch._foreach_copy_"),
        ("from jaxlib import _jax", "line 1: jaxlib._jax"),
        ("from jax._src import core", "line 1: jax._src.core"),
        ("import torch._C", "line 1: torch._C"),
        ("import tensordict\ntensordict._td.TensorDict", "line 2: tensordict._td.TensorDict"),
        ("import torch as t\nt.utils._pytree.tree_map", "line 2: torch.utils._pytree.tree_map"),
        ("from torch import utils as u\nu._pytree", "line 2: torch.utils._pytree"),
        (
            "def f():\n    from tensordict import TensorDict\n    TensorDict._new_unsafe()",
            "line 3: tensordict.TensorDict._new_unsafe",
        ),
        ("import optree\ngetattr(optree, '_C')", "line 2: optree._C"),
    ],
)
def test_a_private_use_is_found(source: str, use: str):
    assert private_uses(source) == [use]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import jax.numpy as jnp\njnp.asarray(x)",
        "self._x = torch\nspec._cached()",
        "from tdbridge._compat import binding\nbinding._x",
    ],
)
def test_a_public_or_own_name_is_not_found(source: str):
    assert private_uses(source) == []
