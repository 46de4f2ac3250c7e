"""The gate on the size of rooms: it lets a tenth pass, no more, and no room without a line."""

from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_SPEC = spec_from_file_location("room_sizes", Path(__file__).parents[1] / "scripts" / "room_sizes.py")
assert _SPEC is not None
assert _SPEC.loader is not None
room_sizes = module_from_spec(_SPEC)
_SPEC.loader.exec_module(room_sizes)

TABLE = """## Sizes

| room | lines | what growth bought |
|---|---|---|
| core | 1,000 | |
| lab | 20 | tables |

## Next
| data | 5 |
"""


def test_a_room_may_grow_by_a_tenth():
    before = room_sizes.allowed(TABLE)
    assert before == {"core": 1000, "lab": 20}
    assert room_sizes.verdict(Counter(core=1100, lab=2), before) == []
    (grown,) = room_sizes.verdict(Counter(core=1101, lab=22), before)
    assert "core has 1,101 lines" in grown
    assert "1,000" in grown
    (unknown,) = room_sizes.verdict(Counter(attic=1), before)
    assert "attic has 1 lines and no line" in unknown


def test_rooms_are_counted_with_all_their_files(tmp_path):
    (tmp_path / "lab" / "page").mkdir(parents=True)
    for name, lines in (("a.py", 3), ("lab/b.py", 2), ("lab/page/c.py", 5), ("lab/d.js", 9)):
        (tmp_path / name).write_text("x\n" * lines)
    assert room_sizes.counted(tmp_path) == Counter(core=3, lab=7)
