"""Fixtures of the parity tests and the proofs: one thread, so that sums come out the same way twice.

And so that test processes side by side do not wait for one another: small models gain nothing from threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
