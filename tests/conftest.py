"""What tests share: seeded generators, points and refusals. Ctrl-C must work in tests: a background job ignores it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from vardass.errors import InputError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=gen(seed))


@contextmanager
def refused(*named: Any, field: str | None = None) -> Iterator[None]:
    """An InputError on ``field``, if one is given, that names each of ``named`` as a word, whatever else it says."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    absent = [each for each in named if not re.search(rf"(?<!\w){re.escape(str(each))}(?!\w)", message)]
    assert not absent, f"{absent} are not named in: {message}"
    assert field is None or caught.value.field == field, f"field is {caught.value.field!r}: {message}"
