"""Links from pages to files of the repository: right on the disk, in a repository browser and on the site.

The site's root is `docs/` laid over the repository: `../benchmarks/results/solvers.md`, as seen from `docs/faq.md`, is
the page `benchmarks/results/solvers.md` there. Programs and data become pages that show them. A link to a file that is
not there is a warning, which `--strict` makes an error.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

SHOWN = (
    "[ACS]*.md",
    "benchmarks/results/*",
    "results/*.md",
    "results/*.yaml",
    "results/*/*.md",
    "results/*/*.png",
    "results/*/report.html",
    "examples/**/*.py",
    "CITATION.cff",
    "LICENSE",
)
AS_CODE = {".py": "python", ".yaml": "yaml", ".cff": "yaml", "": "text"}
CODE_OR_LINK = re.compile(
    r"^```.*?^```|`[^`\n]+`|(?P<before>!?\[[^\]]*\]\()(?P<target>[^)\s#]+)(?P<after>[^)]*\))", re.MULTILINE | re.DOTALL
)


def on_files(files, config):
    """Lay the repository's files under the pages."""
    root = Path(config.config_file_path).parent
    for path in sorted({path for pattern in SHOWN for path in root.glob(pattern) if path.is_file()}):
        name = path.relative_to(root).as_posix()
        if path.suffix in AS_CODE:
            text = f"# {path.name}\n\n````{AS_CODE[path.suffix]} title={name!r}\n{path.read_text()}\n````\n"
            files.append(File.generated(config, f"{name}.md", content=text))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links out of `docs/` and links to programs and notebooks into links to their pages."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match):
        target = match["target"]
        if target is None or "://" in target or target.startswith(("/", "mailto:")):
            return match[0]
        if posixpath.normpath(posixpath.join(folder, target)).startswith("../"):
            target = target.removeprefix("../")
        for name in (f"{target}.md", target.removesuffix(".ipynb") + ".md", target.removesuffix(".py") + ".md"):
            if files.get_file_from_path(posixpath.normpath(posixpath.join(folder, name))):
                target = name
        return f"{match['before']}{target}{match['after']}"

    return CODE_OR_LINK.sub(link, markdown)
