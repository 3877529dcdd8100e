"""Shared fixtures: a tiny backbone with random weights, and one thread, so that tests are exact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny import write_tiny_bundle

from ciar.cloud.sessions import Cloud
from ciar.models.bundle import Bundle, load_bundle

# The same examples in every run, on slow machines too; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


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


@pytest.fixture(scope="session")
def tiny_cloud(tiny_bundle: Bundle) -> Cloud:
    return Cloud(tiny_bundle)
