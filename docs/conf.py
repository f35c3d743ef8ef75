"""Sphinx configuration of the documents: `make docs` builds build/docs from the repository's Markdown files.

The source folder is the root, so a link between two files works on GitHub and in the built pages.
"""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "cnorm"
author = "the cnorm authors"
release = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())[1]
copyright = "the cnorm authors; BSD-3-Clause"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_copybutton"]
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "benchmarks/*.md", "examples/*/README.md"]
exclude_patterns = [".*", "build", "docs/paper"]
root_doc = "README"
nitpicky = True

# The navigation; each file of the documents is in it.
PAGES = {
    "Start": ["docs/streaming", "docs/checking", "docs/service", "docs/models", "docs/training", "docs/when_not"],
    "Guides": [
        "docs/cells",
        "docs/norms",
        "docs/onnx",
        "docs/validator",
        "docs/judging",
        "docs/frameworks",
        "docs/runtimes",
        "docs/embedding",
        "docs/serving",
    ],
    "Contract": ["docs/numerics", "docs/platforms", "SECURITY", "CHANGELOG"],
    "Reference": [f"docs/reference/{name}" for name in ("norms", "networks", "torch", "sessions", "onnx", "c")],
    "Measured": [
        "docs/measurements",
        "docs/paper",
        "benchmarks/README",
        "examples/japanese_vowels/README",
        "examples/demo/README",
    ],
    "Inside": ["docs/design", "docs/kernels", "docs/recipes", "CONTRIBUTING"],
}

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_title = f"cnorm {release}"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"source_edit_link": "", "top_of_page_buttons": []}
pygments_style, pygments_dark_style = "default", "github-dark"

myst_heading_anchors = 4  # links to headings, as GitHub makes them

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have shapes and dtypes
numpydoc_show_class_members = False  # autodoc lists them
# `name` in a docstring links to a public object, if there is one; most are arguments
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", ".*")]

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True


def add_navigation(app, name, source):
    """The table of contents lies here, and not in the README, which GitHub shows."""
    if name == root_doc:
        for caption, pages in PAGES.items():
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def add_index(app, error):
    """The page that opens when the folder is served."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def link_documents(app, what, name, thing, options, lines):
    """`docs/numerics.md` in a docstring becomes a link to the page."""
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md", r":doc:`/docs/\1`", line) for line in lines]


def setup(app):
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", link_documents)
    app.connect("build-finished", add_index)
