"""Notebooks as pages: cells and the outputs stored in them (text, HTML, SVG and PNG) become Markdown."""

import json
from pathlib import Path

from mkdocs.structure.files import File


def on_files(files, config):
    """Add a page beside each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        cells = json.loads(Path(file.abs_src_path).read_text())["cells"]
        text = "\n\n".join(part for cell in cells for part in _cell(cell))
        link = f"[This page as a notebook]({Path(file.src_uri).name})" + "{: download }"
        files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=f"{text}\n\n{link}\n"))
    return files


def _cell(cell):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code" and source.strip():
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            yield _output(output)


def _output(output):
    if output["output_type"] == "stream":
        return _text(output["text"])
    if output["output_type"] == "error":
        raise ValueError(f"a notebook holds an error: {output['ename']}: {output['evalue']}")
    data = output["data"]
    if "image/png" in data:
        png = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="output" class="picture" src="data:image/png;base64,{png}">'
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return f"<div>{''.join(data[kind])}</div>"
    return _text(data["text/plain"])


def _text(lines):
    return f"````text\n{''.join(lines).rstrip()}\n````"
