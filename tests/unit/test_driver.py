"""JAX's CUDA plugin without a driver: its traceback is left out, and no other word of JAX's."""

from __future__ import annotations

import logging

import pytest

from meshpar.mesh import driver, process

FAILED = "Jax plugin configuration error: Exception when calling %s.initialize()"


@pytest.fixture
def said(monkeypatch, caplog):
    """What is left of a message of JAX's, on a machine with a driver or without."""

    def said(message: str, *arguments: str, has_driver: bool, platforms: str = "") -> int:
        caplog.clear()
        monkeypatch.setattr(driver, "is_installed", lambda: has_driver)
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        logging.getLogger("jax._src.xla_bridge").error(message, *arguments)
        return len(caplog.records)

    assert process.driver is driver
    return said


@pytest.mark.parametrize("plugin", ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"])
def test_a_plugin_without_a_driver_is_no_error(said, plugin):
    assert said(FAILED, plugin, has_driver=False) == 0
    assert said(FAILED, plugin, has_driver=False, platforms="cpu") == 0


def test_control_whatever_else_jax_says_is_heard(said):
    assert said(FAILED, "jax_plugins.xla_cuda12", has_driver=True) == 1
    assert said(FAILED, "jax_plugins.xla_cuda12", has_driver=False, platforms="cuda,cpu") == 1
    assert said(FAILED, "jax_plugins.rocm7", has_driver=False) == 1
    assert said("Unable to initialize backend 'cuda'", has_driver=False) == 1


def test_a_driver_is_known_by_its_devices_its_folder_or_its_tool(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.shutil, "which", lambda tool: None)
    assert not driver.is_installed(tmp_path)
    for path in ("dev/nvidia0", "proc/driver/nvidia"):
        root = tmp_path / path.partition("/")[0] / "root"
        (root / path).mkdir(parents=True)
        assert driver.is_installed(root)
    monkeypatch.setattr(driver.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    assert driver.is_installed(tmp_path / "nothing")
