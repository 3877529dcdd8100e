"""Shared fixtures: a tiny backbone with random weights, and one thread, so that tests are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ciar.models.bundle import Bundle, load_bundle
from tiny import write_tiny_bundle


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbones") / "tiny"
    write_tiny_bundle(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny_folder: Path) -> Bundle:
    return load_bundle(tiny_folder)
