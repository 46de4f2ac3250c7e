"""What SECURITY.md says of the files that are read."""

import ast
from pathlib import Path

import vardass

SAFE = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}


def test_no_reader_unpickles():
    """np.load and torch.load say at each call that they do not; nothing else that unpickles is imported."""
    seen = dict.fromkeys(SAFE, 0)
    for path in Path(vardass.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & {"pickle", "joblib", "cloudpickle", "dill"}, path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in SAFE:
                seen[called] += 1
                option, value = SAFE[called]
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get(option) == str(value), f"{path}:{node.lineno}"
    assert all(seen.values())
