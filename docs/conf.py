"""How Sphinx builds these pages: MyST markdown, docstrings in Google style, no network."""

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tdbridge

project = "tdbridge"
author = "The tdbridge authors"
copyright = f"2026, {author}"  # noqa: A001, RUF100 - the name that Sphinx reads
version = release = tdbridge.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else a described attribute of a dataclass is documented twice

# Builds are offline, so names of other projects cannot be looked up. Ours must all resolve.
nitpick_ignore_regex = [
    (r"py:.*", rf"({package})(\..*)?")
    for package in ("torch", "jax", "jaxlib", "tensordict", "optree", "orbax", "numpy", "ml_dtypes")
] + [
    (r"py:.*", rf"({module})\..*")
    for module in ("collections", "contextlib", "os", "pathlib", "typing", "types")
]

# Internal, but named in the signature of a public class.
nitpick_ignore = [
    ("py:class", "tdbridge.layout.constants.Constant"),
    ("py:class", "tdbridge.collectives.groups.Members"),
]

html_theme = "furo"
html_title = f"tdbridge {release}"


def resolve_public_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link ``tdbridge.layout.spec.Layout`` to ``tdbridge.Layout``, where it is documented."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("tdbridge."):
        return None
    parts = target.split(".")
    domain = env.get_domain("py")
    for depth in range(len(parts) - 2, 0, -1):
        public = ".".join([*parts[:depth], parts[-1]])
        if public in domain.objects:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", public, node, contnode
            )
    return None


def keep_colon(
    _app: Any, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading ``Size in bytes: the padding too.`` as a type and a text."""
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]  # an empty comment: napoleon looks at the first line alone


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("missing-reference", resolve_public_name)
    app.connect("autodoc-process-docstring", keep_colon, priority=400)  # before napoleon
