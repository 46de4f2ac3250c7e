"""Notebooks as pages: cells and the outputs that `scripts/run_notebooks.py` stored in them become Markdown."""

import json
from pathlib import Path

from mkdocs.structure.files import File
from pictures import in_both_colours


def on_files(files, config):
    """Add a page beside each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = file.src_uri.removesuffix(".ipynb")
        parts = [f'<a href="{Path(file.src_uri).name}" download>This page as a notebook</a>']
        for number, cell in enumerate(json.loads(Path(file.abs_src_path).read_text())["cells"]):
            source = "".join(cell["source"])
            parts.insert(-1, source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            for output in cell.get("outputs", ()):
                picture = "".join(output.get("data", {}).get("image/svg+xml", ()))
                if picture:
                    for drawn in in_both_colours(config, f"{name}-{number}", picture):
                        files.append(drawn)
                    parts.insert(-1, f"![output]({Path(name).name}-{number}.svg)")
                else:
                    text = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
                    block = f"````text\n{''.join(text).rstrip()}\n````"
                    parts.insert(-1, f'<div class="output" markdown>\n\n{block}\n\n</div>')
        files.append(File.generated(config, f"{name}.md", content="\n\n".join(parts) + "\n"))
    return files
