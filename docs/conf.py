"""`make docs`: the pages of docs/ and the notebooks with their outputs, as HTML.

The repository is the source folder, so that a page's links mean the same here and on GitHub.
"""

project = "gpupool"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "notebooks/*.ipynb"]
# README is GitHub's first page, and its picture is HTML. The folders are not walked through.
exclude_patterns = ["README.md", ".*", "build", "gpupool", "tests", "benchmarks"]

extensions = ["myst_nb"]
nb_execution_mode = "off"
myst_heading_anchors = 3

html_theme = "pydata_sphinx_theme"
html_title = "gpupool"
html_sidebars = {"**": ["globaltoc.html"]}
html_theme_options = {"navbar_center": []}
html_extra_path = ["to_index"]  # index.html, which leads to docs/index.html
html_show_copyright = False
