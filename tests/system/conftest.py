"""One `flexinfer up` for the whole folder: starting Ray takes most of a minute on two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from up_process import Up


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"), "--num-gpus", "2")
    try:
        yield running.start()
    finally:
        running.close()
